"""gRPC as every service speaks it: one server factory, one channel factory, one error mapping."""
