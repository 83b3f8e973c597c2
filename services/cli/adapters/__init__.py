"""The outside world as the command line meets it: gRPC and HTTP to the cluster's processes."""
