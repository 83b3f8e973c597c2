"""Memory between arenas and the network: contiguous where an object must be, shared with a helper.

An object lies in one piece for those who send it, its blocks in slots of their own. The copy also
keeps arenas out of reach of operations whose end is unknown: only these buffers are at stake.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

from services.kvbm.movers.objects import SKIP
from services.kvbm.movers.port import Memory

_ROUND = 1 << 20


class Buffer:
    """A piece of shared memory. Reused, since fresh pages are slow to touch for the first time."""

    def __init__(self, id: int, capacity: int) -> None:
        self.id = id
        self.capacity = capacity
        self.fd = os.memfd_create("forebay-staging", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, capacity)
            self._map = mmap.mmap(self.fd, capacity)
        except BaseException:
            os.close(self.fd)
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.view = memoryview(self._map)
        self.tainted = False
        """Whether somebody may still write into it, for a moment: then it is not used again."""

    def gather(self, parts: Sequence[Memory], offset: int = 0) -> None:
        """Copies the parts in from `offset` on, one after the other.

        In a thread: releases the GIL.
        """
        at = self.address + offset
        for part in parts:
            ctypes.memmove(at, part.address, part.length)
            at += part.length

    def close(self) -> None:
        """Gives the memory back, once nobody looks at it any more."""
        os.close(self.fd)


def scatter(address: int, parts: Sequence[Memory]) -> None:
    """Copies bytes at `address` out to the parts. In a thread: releases the GIL."""
    for part in parts:
        if part.address != SKIP:
            ctypes.memmove(part.address, address, part.length)
        address += part.length


class Staging:
    """At most `count` buffers. Loop's thread only. `dropped` hears of those that are given up."""

    def __init__(self, count: int, dropped: Callable[[Buffer], None]) -> None:
        self._dropped = dropped
        self._free: list[Buffer] = []
        self._made = 0
        self._room = asyncio.Semaphore(count)

    async def take(self, length: int) -> Buffer:
        """A buffer of at least that length; waits for one. Raises OSError without memory."""
        await self._room.acquire()
        for index, buffer in enumerate(self._free):
            if buffer.capacity >= length:
                return self._free.pop(index)
        if self._free:
            self._drop(self._free.pop(0))
        try:
            self._made += 1
            return Buffer(self._made, -(-length // _ROUND) * _ROUND)
        except OSError:
            self._room.release()
            raise

    def give(self, buffer: Buffer, *, reuse: bool = True) -> None:
        """Takes it back; `reuse`: nobody reads or writes it any more."""
        if reuse and not buffer.tainted:
            self._free.append(buffer)
        else:
            self._drop(buffer)
        self._room.release()

    def close(self) -> None:
        """Gives up the free ones."""
        while self._free:
            self._drop(self._free.pop())

    def _drop(self, buffer: Buffer) -> None:
        self._dropped(buffer)
        buffer.close()
