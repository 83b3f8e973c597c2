"""The thread that copies blocks between the engine's cache and the arena.

Loads go first, since requests wait for them; saves go in small pieces between them, and after each
the thread rests for as long as it took, so that copies leave half of the memory's bandwidth to the
engine. Each job ends exactly once, also when copying raises.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from services.common.arena import Arena
from services.common.ownerlock import OwnerLock
from services.common.telemetry.logging import get_logger
from services.worker.connector.model import (
    Attachment,
    Loaded,
    LoadItem,
    LoadOrder,
    Report,
    Saved,
    SaveOrder,
)

SAVE_PIECE_BLOCKS = 8
STOP_TIMEOUT_S = 5.0
log = get_logger(__name__)


class BlockCopier(Protocol):
    """Moves blocks between an engine's cache and one arena (connector/copier.py)."""

    def fence(self) -> Any:
        """Marks the work that the engine's device was given so far. On the engine's thread."""
        ...

    def save(self, blocks: Sequence[int], slots: Sequence[int], after: Any) -> Sequence[int]:
        """Copies G1 blocks into slots; returns each block's checksum over the source's bytes."""
        ...

    def load(self, items: Sequence[LoadItem], after: Any) -> Sequence[bool]:
        """Copies slots into G1 blocks; for each, whether its bytes are what they must be."""
        ...


@dataclass(slots=True)
class _Save:
    order: SaveOrder
    after: Any
    """The forward pass that fills the blocks."""
    checksums: list[int | None]
    seconds: float = 0.0


NOTHING = Report()


class CopyThread:
    """One engine's copies. `report` and the queues are shared; all else is the thread's own."""

    def __init__(
        self,
        make_copier: Callable[[Arena, bool], BlockCopier],
        namespace: bytes,
        shard_bytes: int,
        *,
        rest: float = 1.0,
    ) -> None:
        """`rest`: seconds of rest for each second of saving."""
        self._make = make_copier
        self._namespace = namespace
        self._shard_bytes = shard_bytes
        self._rest = rest
        self._wake = threading.Condition()
        self._attach: Attachment | None = None
        self._loads: deque[tuple[LoadOrder, Any]] = deque()
        self._saves: deque[_Save] = deque()
        self._stopped = False
        self._attached: dict[int, str] = {}
        self._loaded: dict[str, Loaded] = {}
        self._saved: dict[int, Saved] = {}
        self._owner = 0
        self._arena: Arena | None = None
        self._copier: BlockCopier | None = None
        self._lock: OwnerLock | None = None
        self._file: os.stat_result | None = None
        self._failed = False
        self._not_before_s = 0.0
        self._thread = threading.Thread(target=self._main, name="kv-copies", daemon=True)
        self._thread.start()

    # Called by the engine's thread; short.

    def attach(self, attachment: Attachment) -> None:
        """Locks and maps what is named, before any later job."""
        with self._wake:
            self._attach = attachment
            self._wake.notify()

    def load(self, order: LoadOrder) -> None:
        """Brings blocks in, after all work that the device was given so far."""
        after = self._fence()
        with self._wake:
            self._loads.append((order, after))
            self._wake.notify()

    def save(self, order: SaveOrder) -> None:
        """Copies blocks out, after all work that the device was given so far."""
        after = self._fence()
        with self._wake:
            self._saves.append(_Save(order, after, []))
            self._wake.notify()

    def _fence(self) -> Any:
        copier = self._copier
        # None is the strictest: the copier then waits for the whole device.
        return copier.fence() if copier is not None else None

    def drop(self, order: SaveOrder) -> None:
        """Ends a save without a copy."""
        with self._wake:
            self._saved[order.job] = Saved((None,) * len(order.blocks))

    @property
    def failed_loads(self) -> bool:
        """Whether there is a failed load that nobody was told of yet."""
        return self._failed

    def take(self) -> Report:
        """What has ended since the last call."""
        if not (self._attached or self._loaded or self._saved):
            # Nearly every step; what ends just now is told with the next.
            return NOTHING
        with self._wake:
            report = Report(self._attached, self._loaded, self._saved)
            self._attached, self._loaded, self._saved = {}, {}, {}
            self._failed = False
            return report

    def stop(self) -> None:
        """Ends the thread after the copy that runs."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(STOP_TIMEOUT_S)

    # Below: the thread.

    def _main(self) -> None:
        while True:
            with self._wake:
                while not self._stopped and not self._due():
                    pause = self._not_before_s - time.monotonic() if self._saves else None
                    self._wake.wait(None if pause is None else max(0.0, pause))
                if self._stopped:
                    break
                attach, self._attach = self._attach, None
                load = self._loads.popleft() if attach is None and self._loads else None
                save = self._saves[0] if attach is None and load is None else None
            if attach is not None:
                self._do_attach(attach)
            elif load is not None:
                self._do_load(*load)
            elif save is not None:
                self._do_save(save)
        if self._lock is not None:
            self._lock.close()

    def _due(self) -> bool:
        return bool(
            self._attach is not None
            or self._loads
            or (self._saves and time.monotonic() >= self._not_before_s)
        )

    def _do_attach(self, attachment: Attachment) -> None:
        why = ""
        try:
            lock = OwnerLock(Path(attachment.lock_path))
            if self._lock is not None:
                self._lock.close()
            self._lock, self._owner = lock, attachment.owner
            arena = self._map(Path(attachment.arena_path))
            if arena is not self._arena:
                self._arena = arena
                self._copier = self._make(arena, attachment.verify)
        except Exception as exc:  # the job's boundary: the link hears why, and tries again
            log.warning("can't use the arena", path=attachment.arena_path, exc_info=exc)
            why = f"{type(exc).__name__}: {exc}"
        with self._wake:
            self._attached[attachment.owner] = why

    def _map(self, path: Path) -> Arena:
        """The arena, as it is mapped already or anew."""
        file = path.stat()
        if (
            self._arena is not None
            and self._file is not None
            and os.path.samestat(file, self._file)
        ):
            return self._arena
        arena = Arena.open(path)
        self._file = file
        geometry = arena.geometry
        if arena.namespace != self._namespace or geometry.shard_bytes != self._shard_bytes:
            raise ValueError("the arena is not of this engine's namespace and geometry")
        return arena

    def _do_load(self, order: LoadOrder, after: Any) -> None:
        began = time.perf_counter()
        good, bad = 0, tuple[int, ...]()
        try:
            if self._copier is not None and order.items:
                results = list(self._copier.load(order.items, after))
                bad = tuple(i for i, ok in enumerate(results) if not ok)
                good = bad[0] if bad else len(results)
        except Exception:  # the job's boundary: the request computes what was not loaded
            log.exception("a load failed", request=order.request)
            good = 0
        result = Loaded(good, bad, time.perf_counter() - began)
        with self._wake:
            self._loaded[order.request] = result
            self._failed |= good < len(order.blocks)

    def _do_save(self, save: _Save) -> None:
        """One piece of a save; it stays at the head of the queue until its last."""
        order, done = save.order, len(save.checksums)
        piece = slice(done, done + SAVE_PIECE_BLOCKS)
        began = time.perf_counter()
        blocks = order.blocks[piece]
        try:
            if self._copier is None:
                raise RuntimeError("no arena is mapped")
            save.checksums.extend(self._copier.save(blocks, order.slots[piece], save.after))
        except Exception:  # the job's boundary: what was not copied gets no key
            log.exception("a save failed", blocks=len(blocks))
            del save.checksums[done:]
            save.checksums.extend([None] * len(blocks))
        took = time.perf_counter() - began
        save.seconds += took
        self._not_before_s = time.monotonic() + took * self._rest
        if len(save.checksums) == len(order.blocks):
            with self._wake:
                self._saves.popleft()
                self._saved[order.job] = Saved(tuple(save.checksums), save.seconds)
