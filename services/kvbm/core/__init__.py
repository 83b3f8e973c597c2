"""The daemon's decisions, pure: what lies where, who may write, who reads, what goes.

Start at catalog.py (the blocks of one namespace). Nothing here does I/O, reads a clock or draws
random numbers. The shell performs what a call decided (`Catalog.take_changes`) before the next.
"""
