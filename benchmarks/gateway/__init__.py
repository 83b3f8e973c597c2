"""What the gateway adds to a request in time and CPU, and how fast the router decides."""
