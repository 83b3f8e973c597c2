"""Waiting for a condition: polls with a deadline, and says at the end what was seen last."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
PROGRESS_S = 180.0
"""Longest wait for work that is promised to be done, but not how fast: machines differ."""


async def until(
    probe: Callable[[], Awaitable[T]],
    accept: Callable[[T], Any] = bool,
    *,
    within_s: float,
    what: str = "condition",
    every_s: float = 0.02,
) -> T:
    """Polls `probe` until `accept` likes its answer; the answer. Fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        seen = await probe()
        if accept(seen):
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {within_s} s; last seen: {seen!r}")
        await asyncio.sleep(every_s)
