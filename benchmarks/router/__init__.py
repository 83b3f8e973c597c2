"""What placing a request costs, beside NVIDIA Dynamo: `python -m benchmarks.router`."""
