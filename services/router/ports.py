"""What the router's shell needs from outside."""

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds on a steady clock (time.monotonic; tests bring their own)."""
