"""Memory as movers want it: whole pages, with an address."""

import ctypes
import mmap
import os

from services.kvbm.movers.port import Memory

PAGE = 4096


class Pages:
    """Page-aligned memory that stays mapped as long as this object lives."""

    def __init__(self, size: int) -> None:
        self.bytes = mmap.mmap(-1, size)
        self._anchor = ctypes.c_char.from_buffer(self.bytes)
        self.memory = Memory(ctypes.addressof(self._anchor), size)

    def part(self, offset: int, length: int) -> Memory:
        return Memory(self.memory.address + offset, length)

    def fill(self) -> bytes:
        """Random bytes; what they are."""
        self.bytes[:] = os.urandom(len(self.bytes))
        return self.bytes[:]

    def clear(self) -> None:
        self.bytes[:] = bytes(len(self.bytes))
