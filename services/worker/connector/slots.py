"""Empty slots granted by kvbm: filled by the link's thread, taken by the scheduler's.

Slots of an owner may be written until its copies are over. Only when none runs may the owner id be
given up: that is what `quiet` tells.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from services.worker.connector.model import Slot


class SlotPool:
    """The slots of one owner at a time. Thread-safe; its lock is never held for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: deque[Slot] = deque()
        self._owner = 0
        self._open = False
        self._copying = 0

    @property
    def owner(self) -> int:
        """The owner of slots that were taken; 0: none yet."""
        return self._owner

    @property
    def copying(self) -> int:
        """Slots taken whose copies are not known to be over."""
        return self._copying

    def __len__(self) -> int:
        return len(self._slots)

    def open(self, owner: int) -> None:
        """Begins with a new owner. The former one must be quiet."""
        with self._lock:
            assert self._copying == 0, "copies for the former owner run"
            self._owner, self._open = owner, True
            self._slots.clear()

    def add(self, owner: int, slots: Iterable[Slot]) -> None:
        """Adds slots, unless they are of another owner or the pool is closed."""
        with self._lock:
            if self._open and owner == self._owner:
                self._slots.extend(slots)

    def take(self) -> Slot | None:
        """A slot to fill; its copy counts as running until `done`. None: there is none."""
        with self._lock:
            if not self._open or not self._slots:
                return None
            self._copying += 1
            return self._slots.popleft()

    def done(self, count: int) -> None:
        """So many copies are over."""
        with self._lock:
            self._copying -= count

    def close(self) -> None:
        """Gives no slots any more; what was granted is forgotten."""
        with self._lock:
            self._open = False
            self._slots.clear()

    @property
    def quiet(self) -> bool:
        """Closed, and no copy into its slots runs."""
        return not self._open and self._copying == 0
