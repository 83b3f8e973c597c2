"""The port between the copier and whoever moves the bytes: the host's processor, or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Lane(Protocol):
    """Moves blocks in one direction. One thread at a time."""

    def move(self, blocks: Sequence[int], slots: Sequence[int], sums: bool) -> Iterator[int]:
        """Copies block i to or from slot i; yields for each, in order, once its copy is over.

        What it yields is the checksum of the block's bytes in G1 after the copy; 0 without `sums`.
        Nothing is under way any more when it has ended, whether by itself or by an error.
        """
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
    clear: Callable[[Sequence[int]], None]
    """Fills blocks of the cache with zeros; is done when it returns."""
    close: Callable[[], None]
