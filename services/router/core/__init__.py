"""The router's decisions, pure: events and requests in, placements out.

Start at placement.py (RouterCore). Nothing here does I/O, reads a clock or draws random numbers;
time and chance are arguments. So the service, tests, an offline replay and a simulator drive it.
"""
