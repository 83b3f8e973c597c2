"""The port between the copier and whoever moves the bytes: the host's processor, or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Finish = Callable[[], list[int]]
"""Waits until a batch is copied, and returns the checksums of its blocks in G1, in order."""


class Lane(Protocol):
    """Moves batches in one direction. One thread at a time."""

    batch_blocks: int
    """Most blocks of a batch."""
    depth: int
    """Batches that may be begun before the first is finished."""

    def begin(self, blocks: Sequence[int], slots: Sequence[int]) -> Finish:
        """Starts copying block i to or from slot i."""
        ...


@dataclass(frozen=True, slots=True)
class Lanes:
    """Both directions, and how to hold back copies until the engine's own work is done."""

    save: Lane
    load: Lane
    fence: Callable[[], Any]
    """Marks all work that the engine's current stream was given so far."""
    wait: Callable[[Lane, Any], None]
    """Lets a lane begin nothing before that work is done; None: any work whatever."""
    close: Callable[[], None]
