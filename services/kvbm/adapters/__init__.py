"""What the daemon reaches outside: one file for each thing."""
