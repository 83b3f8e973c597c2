"""Measurements, each a module that prints a table or JSON: `python -m benchmarks.gateway`."""
