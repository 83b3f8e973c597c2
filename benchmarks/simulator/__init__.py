"""Measures a real engine's steps, for the simulator: `python -m benchmarks.simulator --help`."""
