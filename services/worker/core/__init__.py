"""The worker's decisions, pure: no I/O, no clock, no randomness, no generated types."""
