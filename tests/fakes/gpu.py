"""A GPU that isn't one: host memory, whose engine's work is late and whose copies can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class FakeGpu:
    """The device of services/worker/connector/gpucopy.py, with streams that can be watched.

    Copies happen at once; the engine's own kernels (`kernel`) only when somebody holds a stream
    back for them: who reads the cache without that reads what was there before.
    """

    def __init__(self) -> None:
        self.late: list[Callable[[], None]] = []
        self.pinned: dict[int, int] = {}
        self.pins: list[tuple[int, int]] = []
        self.refuse_pin_after = 1 << 30
        self.error = ""
        self.waits = 0

    def kernel(self, work: Callable[[], None]) -> None:
        """Work of the engine that has been launched and has not run."""
        self.late.append(work)

    def stream(self) -> Any:
        return object()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Any:
        return tuple(self.late)

    def hold(self, stream: Any, event: Any) -> None:
        for work in list(self.late) if event is None else event:
            if work in self.late:
                self.late.remove(work)
                work()

    def wait(self, event: Any) -> None:
        self.waits += 1
        if self.error:
            raise RuntimeError(self.error)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    bounce = buffer

    def pin(self, address: int, length: int) -> str:
        if len(self.pins) >= self.refuse_pin_after:
            return "out of memory"
        self.pins.append((address, length))
        self.pinned[address] = length
        return ""

    def unpin(self, address: int) -> None:
        del self.pinned[address]
