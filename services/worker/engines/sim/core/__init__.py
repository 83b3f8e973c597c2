"""The simulated engine, pure: requests and times in, steps out.

Start at simulator.py (Simulator). Nothing here reads a clock, waits or draws random numbers, so the
worker, the offline replay and the tests drive the same code.
"""
