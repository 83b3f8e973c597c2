"""Stores of objects: a mover of whole objects, and the small requests around it."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.kvbm.movers.port import Memory, ObjectMover

SKIP = 0
"""Address of a part whose bytes nobody wants; in pieces to get only."""


class StoreError(Exception):
    """A store did not do what was asked; the words say why.

    `away`: it did not answer at all, so asking it anything else is a waste of time.
    """

    def __init__(self, why: str, *, away: bool = False) -> None:
        super().__init__(why)
        self.away = away


@dataclass(frozen=True, slots=True)
class Entry:
    """One object in a list."""

    key: str
    size: int
    modified_s: float
    """Unix time by the store's own clock."""


class Objects(ObjectMover, Protocol):
    """One store, seen from a prefix of its own. Loop's thread only.

    Every request has a deadline. Those that are not moves raise StoreError; moves put its words
    into `Moved.errors`, "away: " before them when the store did not answer.
    """

    place: str
    """Where it is, for people."""

    async def open(self, timeout_s: float) -> None:
        """Tries a small object and picks the mover that works; again after trouble."""
        ...

    async def size(self, key: str, timeout_s: float) -> Entry | None:
        """What is at `key`; None: nothing."""
        ...

    async def read(self, key: str, timeout_s: float) -> bytes | None:
        """A whole object; None: there is none."""
        ...

    async def write(self, key: str, data: bytes, timeout_s: float, *, absent: bool = False) -> bool:
        """Writes one, if none is there when `absent`; whether it did. Whole or not at all."""
        ...

    async def delete(self, keys: Sequence[str], timeout_s: float) -> None:
        """Deletes them; those that aren't there are no error."""
        ...

    def entries(self, prefix: str, timeout_s: float) -> AsyncIterator[Sequence[Entry]]:
        """All objects below the folder `prefix`, in batches; each batch has the deadline."""
        ...

    async def folders(self, timeout_s: float) -> Sequence[str]:
        """Names of the folders at the top."""
        ...

    async def close(self) -> None:
        """Ends it. Waits for nothing that hangs."""
        ...


AWAY = "away: "
MISSING = "not found"


def told(exc: StoreError) -> str:
    """A StoreError in `Moved.errors`."""
    return f"{AWAY}{exc}" if exc.away else str(exc)


def view(memory: Memory) -> memoryview:
    """The bytes of a memory."""
    return memoryview((ctypes.c_char * memory.length).from_address(memory.address)).cast("B")
