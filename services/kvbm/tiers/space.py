"""One namespace's slots on the local disk: blocks in and out, each vouched for by its header.

Order is all there is to it: a used slot's header is voided before its payload changes, and says
SEALED only after the payload is written. So a process killed at any instant leaves slots that are
whole or hold nothing. Whatever else may happen to bytes on a disk, the checksums find at the load.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from services.common.arena import HEADER_BYTES, Arena, CorruptHeader, SlotHeader, SlotState
from services.common.telemetry.logging import get_logger
from services.kvbm.movers.plain import words
from services.kvbm.movers.port import FileMover, FilePiece, Memory, Moved
from services.kvbm.movers.threads import Threads, joined
from services.kvbm.tiers.files import SpaceFiles, check_linked
from services.kvbm.tiers.port import Transfer, Transferred

log = get_logger(__name__)
T = TypeVar("T")

_CHECK_S = 1.0
_ERASE_S = 2.0
_RESTORE_S = 120.0
_CLOSE_S = 5.0
_NOTHING = SlotHeader(SlotState.FREE, 0)


class Disk(Protocol):
    """What a namespace's slots need of the tier."""

    mover: FileMover
    threads: Threads

    def refusal(self) -> str:
        """Why nothing is stored at present; empty: it is."""
        ...

    def ended(self, storing: bool, errors: Sequence[str | None], size: int, seconds: float) -> None:
        """A batch has ended: for the counters, and for the tier's health. `size` in bytes."""
        ...

    def degrade(self, why: str) -> None:
        """Stores nothing more, until a probe has worked and everything owed is erased."""
        ...

    async def enlarge(self, space: LocalSpace) -> int:
        """Adds slots as far as cap and disk allow; how many."""
        ...

    async def closed(self, space: LocalSpace, remove: bool) -> None:
        """The space has closed its files."""
        ...


class _Batch:
    """A batch on its way: what failed so far, what may still be written, how much time is left."""

    def __init__(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        self.transfers = transfers
        self.errors: list[str | None] = [None] * len(transfers)
        self.fence: Awaitable[None] | None = None
        self._start = time.monotonic()
        self._end = self._start + timeout_s

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._start

    @property
    def time_left(self) -> float:
        """Seconds until its deadline."""
        return max(self._end - time.monotonic(), 0.001)

    def left(self) -> list[int]:
        """Those that have not failed."""
        return [index for index, error in enumerate(self.errors) if error is None]

    def fail(self, index: int, why: str | None) -> None:
        """Notes a failure, if there is one; the first one stands."""
        if why and self.errors[index] is None:
            self.errors[index] = why

    def result(self) -> Transferred:
        """How it ended."""
        return Transferred(self.errors, self.seconds, self.fence)


class LocalSpace:
    """Implements DiskSpace on files. Loop's thread only.

    A store or load whose caller is cancelled goes on to its end; its slots are in use until then.
    """

    def __init__(
        self, disk: Disk, files: SpaceFiles, namespace: bytes, arena: Arena, found: Sequence[bytes]
    ) -> None:
        self.slots = files.slots
        self.files = files
        self.namespace = namespace
        self.arena = arena
        self.geometry = arena.geometry
        self._disk = disk
        self._found = list(found)
        """Each segment's headers as they were at start, until somebody looks."""
        self._free = bytearray(self.slots)
        """1: the slot's header on disk is known to say that it holds nothing."""
        self._busy: set[int] = set()
        """Slots being stored, or with a write that may still come."""
        self._owed: set[int] = set()
        """Slots still to be erased."""
        self._lost: set[int] = set()
        self._order = asyncio.Lock()
        """Header writes happen one batch after the other."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def headers(self) -> Iterator[SlotHeader | CorruptHeader]:
        """See DiskSpace. Once: what was found at start is not kept."""
        slot = 0
        while self._found:
            raw = self._found.pop(0)
            for at in range(0, len(raw), HEADER_BYTES):
                header = _unpacked(raw[at : at + HEADER_BYTES], self.namespace)
                if (
                    isinstance(header, SlotHeader)
                    and header.state is SlotState.FREE
                    and slot not in self._busy
                ):
                    self._free[slot] = 1
                yield header
                slot += 1

    async def grow(self) -> int:
        """Adds slots, free ones after all others; how many (0: cap or disk allow none)."""
        count = await self._disk.enlarge(self)
        self._free.extend(b"\1" * count)
        self.slots += count
        return count

    def take_lost(self) -> set[int]:
        """Slots whose blocks were found to be gone since the last call: files were deleted."""
        lost, self._lost = self._lost, set()
        return lost

    async def store(self, transfers: Sequence[Transfer], timeout_s: float) -> Transferred:
        """See DiskSpace."""
        return await self._whole(self._store(_Batch(transfers, timeout_s)))

    async def load(self, transfers: Sequence[Transfer], timeout_s: float) -> Transferred:
        """See DiskSpace."""
        return await self._whole(self._load(_Batch(transfers, timeout_s)))

    async def erase(self, slots: Sequence[int]) -> None:
        """See DiskSpace. Slots being stored are left out: their old blocks are void already.

        What can't be erased now degrades the tier: it is erased before anything else is stored.
        """
        mine = range(self.slots)
        self._owed.update(slot for slot in slots if slot in mine and slot not in self._busy)
        await self._whole(self._erase())

    async def pay(self) -> str:
        """Erases what is still to be erased; empty, or why some of it can't be."""
        async with self._order:
            slots = sorted(slot for slot in self._owed - self._busy if not self._free[slot])
            if not slots:
                return ""
            self._owed.difference_update(slots)
            ran = await self._disk.threads.run(
                [partial(self._put, [(slot, _NOTHING) for slot in slots])], _ERASE_S
            )
        (errors,) = ran.results
        if isinstance(errors, Exception):
            errors = [_words(errors)] * len(slots)
        for slot, error in zip(slots, errors, strict=True):
            if error is None:
                self._free[slot] = 1
            else:
                self._owed.add(slot)
        if ran.fence is not None:
            self._withhold(slots, ran.fence)
        return next((error for error in errors if error), "")

    async def restore(self) -> None:
        """Makes files that somebody deleted anew, without their blocks. Raises OSError."""
        async with self._order:
            segments = await self._disk.threads.call(self.files.restore, _RESTORE_S)
        for segment in segments:
            slots = range(segment.first, segment.first + segment.slots)
            self._lost.update(slots)
            for slot in slots:
                self._free[slot] = 1

    async def close(self, *, remove: bool = False) -> None:
        """See DiskSpace. Files in which something hangs stay open."""
        self.slots = 0
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        if self._tasks:
            # Their descriptors must not come to mean another file.
            log.warning("I/O hangs; its files stay open", folder=str(self.files.path))
            for task in self._tasks:
                task.cancel()
        else:
            for segment in self.files.segments:
                await self._disk.mover.forget_file(segment.data)
            self.files.close()
        await self._disk.closed(self, remove)

    # ---- batches

    async def _store(self, batch: _Batch) -> Transferred:
        mine: list[int] = []
        for index, transfer in enumerate(batch.transfers):
            batch.fail(index, self._disk.refusal() or self._unfit(transfer))
            if transfer.slot in self._busy:
                batch.fail(index, "refused: an older write to the slot may still come")
            if batch.errors[index] is None:
                self._busy.add(transfer.slot)
                mine.append(index)
        self._owed.difference_update(batch.transfers[index].slot for index in mine)
        await self._write_headers(batch, _void, used=True)
        for index in batch.left():
            self._free[batch.transfers[index].slot] = 0
        await self._move(batch, self._disk.mover.write)
        await self._write_headers(batch, lambda header: header)
        self._settle(batch, mine)
        return self._ended(batch, storing=True)

    async def _load(self, batch: _Batch) -> Transferred:
        for index, transfer in enumerate(batch.transfers):
            batch.fail(index, self._unfit(transfer))
        await self._move(batch, self._disk.mover.read)
        for index, error in enumerate(batch.errors):
            if error and error.startswith("short"):
                # The file ends before the block does: this copy is bad for good.
                batch.errors[index] = f"corrupt: {error}"
        await self._check(batch)
        return self._ended(batch, storing=False)

    def _settle(self, batch: _Batch, mine: Iterable[int]) -> None:
        """Gives back the slots of a store; those that failed hold nothing from now on."""
        bad = [batch.transfers[index].slot for index in mine if batch.errors[index]]
        self._busy.difference_update(
            batch.transfers[index].slot for index in mine if not batch.errors[index]
        )
        self._owed.update(bad)
        if batch.fence is not None:
            self._withhold(bad, batch.fence)
            return
        self._busy.difference_update(bad)
        if bad:
            self._spawn(self._erase())

    def _ended(self, batch: _Batch, *, storing: bool) -> Transferred:
        size = len(batch.left()) * self.geometry.stride
        self._disk.ended(storing, batch.errors, size, batch.seconds)
        return batch.result()

    # ---- steps

    async def _move(
        self, batch: _Batch, move: Callable[[Sequence[FilePiece], float], Awaitable[Moved]]
    ) -> None:
        indices = batch.left()
        if not indices:
            return
        pieces: list[FilePiece] = []
        for index in indices:
            transfer = batch.transfers[index]
            segment, number = self.files.place(transfer.slot)
            memory = Memory(self.arena.payload_address(transfer.arena_slot), self.geometry.stride)
            pieces.append(FilePiece(memory, segment.data, number * self.geometry.stride))
        moved = await move(pieces, batch.time_left)
        for index, error in zip(indices, moved.errors, strict=True):
            batch.fail(index, error)
        batch.fence = joined(batch.fence, moved.fence)

    async def _write_headers(
        self, batch: _Batch, change: Callable[[SlotHeader], SlotHeader], *, used: bool = False
    ) -> None:
        """Writes the headers of all that have not failed; `used`: where slots may hold blocks."""
        async with self._order:
            indices = batch.left()
            if used:
                indices = [i for i in indices if not self._free[batch.transfers[i].slot]]
            if not indices:
                return
            chosen = [batch.transfers[index] for index in indices]
            headers = [(transfer.slot, change(transfer.header)) for transfer in chosen]
            ran = await self._disk.threads.run([partial(self._put, headers)], batch.time_left)
        (errors,) = ran.results
        if isinstance(errors, Exception):
            errors = [_words(errors)] * len(indices)
        for index, error in zip(indices, errors, strict=True):
            batch.fail(index, error)
        batch.fence = joined(batch.fence, ran.fence)

    def _put(self, headers: Sequence[tuple[int, SlotHeader]]) -> list[str | None]:
        """Writes headers, in a thread; for each, None or why not."""
        errors: list[str | None] = []
        checked: dict[int, str | None] = {}
        for slot, header in headers:
            segment, number = self.files.place(slot)
            try:
                if segment.number not in checked:
                    check_linked(segment)
                    checked[segment.number] = None
                raw = header.pack(self.namespace)
                count = os.pwrite(segment.headers, raw, number * HEADER_BYTES)
                errors.append(None if count == len(raw) else f"short: {count} bytes of a header")
            except OSError as exc:
                errors.append(words(exc))
        return errors

    async def _check(self, batch: _Batch) -> None:
        """Fails all whose header or bytes are not those of the block that is wanted."""
        indices = batch.left()
        # Two threads' work: they let the interpreter go while they sum.
        parts = [part for part in (indices[0::2], indices[1::2]) if part]
        calls = [partial(self._verify, [batch.transfers[i] for i in part]) for part in parts]
        # What has come in time is not given up for its check, which writes nothing.
        ran = await self._disk.threads.run(calls, max(batch.time_left, _CHECK_S))
        for part, errors in zip(parts, ran.results, strict=True):
            if isinstance(errors, Exception):
                errors = [_words(errors)] * len(part)
            for index, error in zip(part, errors, strict=True):
                batch.fail(index, error)

    def _verify(self, transfers: Sequence[Transfer]) -> list[str | None]:
        """Looks at headers on disk and bytes in the arena, in a thread; for each, what is wrong."""
        errors: list[str | None] = []
        for transfer in transfers:
            segment, number = self.files.place(transfer.slot)
            try:
                raw = os.pread(segment.headers, HEADER_BYTES, number * HEADER_BYTES)
            except OSError as exc:
                errors.append(words(exc))
                continue
            error = _difference(transfer.header, _unpacked(raw, self.namespace))
            if not error and self.arena.checksums(transfer.arena_slot) != transfer.header.checksums:
                error = "corrupt: the bytes don't fit their checksums"
            errors.append(error or None)
        return errors

    def _unfit(self, transfer: Transfer) -> str:
        """Why a transfer can't be right; empty: it may be."""
        header = transfer.header
        if not (0 <= transfer.slot < self.slots and 0 <= transfer.arena_slot < self.arena.slots):
            return "refused: no such slot"
        if header.payload_bytes != self.geometry.payload_bytes:
            return f"refused: {header.payload_bytes} bytes are not a block"
        if len(header.checksums) != self.geometry.ranks or header.state is not SlotState.SEALED:
            return "refused: the block's header is not sealed"
        return ""

    # ---- tasks

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Does it to its end, also when the caller is cancelled."""
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _withhold(self, slots: Sequence[int], fence: Awaitable[None]) -> None:
        """Keeps slots from being stored to until nothing old can be written to them any more."""
        self._busy.update(slots)
        self._spawn(self._release(slots, fence))

    async def _release(self, slots: Sequence[int], fence: Awaitable[None]) -> None:
        await fence
        self._busy.difference_update(slots)
        await self._erase()

    async def _erase(self) -> None:
        if why := await self.pay():
            self._disk.degrade(f"erasing: {why}")


def _void(header: SlotHeader) -> SlotHeader:
    """The header of a slot while it is being filled."""
    return replace(header, state=SlotState.FILLING, owner=0)


def _unpacked(raw: bytes, namespace: bytes) -> SlotHeader | CorruptHeader:
    try:
        return SlotHeader.unpack(raw, namespace)
    except CorruptHeader as exc:
        return exc


def _difference(wanted: SlotHeader, found: SlotHeader | CorruptHeader) -> str:
    """Why the header on disk does not vouch for the block that is wanted; empty: it does."""
    if isinstance(found, CorruptHeader):
        return f"corrupt: {found}"
    if found.state is not SlotState.SEALED:
        return "corrupt: the slot holds nothing"
    for name in ("key", "parent", "payload_bytes", "checksums"):
        if getattr(found, name) != getattr(wanted, name):
            return f"corrupt: the slot's header has another {name.replace('_', ' ')}"
    return ""


def _words(exc: Exception) -> str:
    return words(exc) if isinstance(exc, OSError) else f"failed: {exc!r}"
