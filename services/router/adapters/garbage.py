"""Keeps the collector of garbage away from what is large and lives long.

A full collection walks every dict: with millions of blocks in the index that holds the loop for
tens of milliseconds, and finds nothing. What has taken long once is frozen: set apart, still freed
by its reference count, and never walked again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.telemetry.logging import get_logger

_LONG_S = 0.005

log = get_logger(__name__)


class Collections:
    """Watches full collections; `tend` freezes when one took too long."""

    def __init__(self, long_s: float = _LONG_S) -> None:
        self._long_s = long_s
        self._began = 0.0
        self._took = 0.0

    def watch(self, phase: str, info: dict[str, int]) -> None:
        """To be called by the collector (gc.callbacks)."""
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began = time.thread_time()
        else:
            self._took = max(self._took, time.thread_time() - self._began)

    def tend(self) -> bool:
        """Freezes all that lives now if the last collections took too long; says whether."""
        took, self._took = self._took, 0.0
        if took <= self._long_s:
            return False
        gc.freeze()
        log.info("objects are frozen", collection_ms=round(took * 1000, 1))
        return True


@contextmanager
def watched_collections() -> Iterator[Collections]:
    """Watches this process's collections while it lasts."""
    collections = Collections()
    gc.callbacks.append(collections.watch)
    try:
        yield collections
    finally:
        gc.callbacks.remove(collections.watch)
