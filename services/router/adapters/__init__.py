"""The router's outside: discovery, workers' event streams, metrics."""
