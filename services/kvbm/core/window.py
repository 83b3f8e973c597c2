"""The export window: pieces of one buffer, lent to peers for a while.

A piece comes back when its reader says so or when its time is over. That a late reader may find
other bytes there is the reader's to notice: it compares checksums. Pure; knows no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the window, whole pages."""

    offset: int
    length: int


@dataclass(slots=True)
class _Export:
    pieces: Sequence[Piece]
    expires_s: float
    """Infinity while it is being filled."""


class Window:
    """Room of `size` bytes, and the exports that lie in it. Times are seconds of a steady clock."""

    def __init__(self, size: int) -> None:
        self.size = size // PAGE * PAGE
        self._free = {0: self.size} if self.size else {}
        """Free parts: length by offset; no two touch."""
        self._exports: dict[int, _Export] = {}

    def __len__(self) -> int:
        """Exports that haven't ended."""
        return len(self._exports)

    @property
    def used(self) -> int:
        """Bytes that exports take."""
        return self.size - sum(self._free.values())

    def take(self, export: int, length: int, most: int) -> list[Piece]:
        """Up to `most` pieces of `length` bytes for a new export; [] when there is room for none.

        It stays until `end`; time ends it only after `filled`.
        """
        assert export not in self._exports, "an export has one name"
        length = -(-length // PAGE) * PAGE
        pieces: list[Piece] = []
        for offset in sorted(self._free):
            room = self._free[offset]
            count = min(room // length, most - len(pieces))
            if count <= 0:
                continue
            pieces += [Piece(offset + n * length, length) for n in range(count)]
            del self._free[offset]
            if room > count * length:
                self._free[offset + count * length] = room - count * length
        if pieces:
            self._exports[export] = _Export(pieces, float("inf"))
        return pieces

    def filled(self, export: int, expires_s: float) -> None:
        """Its bytes are there; from `expires_s` on `expire` ends it."""
        self._exports[export].expires_s = expires_s

    def end(self, export: int) -> bool:
        """Its pieces are free again; False: it had ended."""
        ended = self._exports.pop(export, None)
        if ended is None:
            return False
        for piece in ended.pieces:
            self._free[piece.offset] = piece.length
        self._join()
        return True

    def expire(self, now_s: float) -> int:
        """Ends those whose time has come; how many."""
        late = [id for id, export in self._exports.items() if export.expires_s <= now_s]
        for id in late:
            self.end(id)
        return len(late)

    def _join(self) -> None:
        joined: dict[int, int] = {}
        last = None
        for offset in sorted(self._free):
            if last is not None and last + joined[last] == offset:
                joined[last] += self._free[offset]
            else:
                joined[offset], last = self._free[offset], offset
        self._free = joined

    def check_invariants(self) -> None:
        """Raises AssertionError when pieces overlap, or room is lost."""
        parts = [(offset, length) for offset, length in self._free.items()]
        parts += [(p.offset, p.length) for e in self._exports.values() for p in e.pieces]
        at = 0
        for offset, length in sorted(parts):
            assert offset == at and length > 0, "the window has a gap, or parts that overlap"
            at += length
        assert at == self.size
        ends = {offset + length for offset, length in self._free.items()}
        assert not ends & self._free.keys(), "free parts touch"
