"""One namespace in remote storage: runs, found by name, moved whole, verified in the arena."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.common.arena import NO_KEY, Arena, CorruptHeader, SlotHeader, SlotState
from services.common.telemetry.logging import get_logger
from services.kvbm.movers.objects import AWAY, MISSING, SKIP, Objects, StoreError, view
from services.kvbm.movers.port import Memory, ObjectPiece
from services.kvbm.tiers.known import Known
from services.kvbm.tiers.port import Transfer, Transferred
from services.kvbm.tiers.runs import OtherRuns, head_bytes, object_bytes, pack_head, unpack_head

log = get_logger(__name__)
MOVES_AT_ONCE = 4
ASKED_AT_ONCE = 3
"""Requests of one step of the search for a chain's end."""
CORRUPT = "corrupt: "
_DELETE_S = 5.0


@dataclass(slots=True)
class RemoteCounters:
    """What a remote tier has done since the start."""

    stored_blocks: int = 0
    skipped_blocks: int = 0
    """Not written because the run was there already."""
    loaded_blocks: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    asked: int = 0
    """Requests for whether a run is there."""
    corrupt: int = 0
    errors: int = 0


class RemoteSpace:
    """Implements ObjectSpace. Loop's thread only; raises nothing but CancelledError."""

    def __init__(
        self,
        objects: Objects,
        arena: Arena,
        run_blocks: int,
        counters: RemoteCounters,
        *,
        refusal: Callable[[bool], str],
        failed: Callable[[str, bool], None],
        used: Callable[[str], None],
        closed: Callable[[RemoteSpace], None],
    ) -> None:
        self.run_blocks = run_blocks
        self.namespace = arena.namespace
        self._folder = arena.namespace.hex()
        self._objects = objects
        self._arena = arena
        self._geometry = arena.geometry
        self._counters = counters
        self._refusal = refusal
        self._failed = failed
        self._used = used
        self._closed = closed
        self._open = False
        self._known = Known(time.monotonic)
        self._head_bytes = head_bytes(run_blocks)
        # Heads lie in pages of their own, so that files may be read and written directly.
        self._pages = mmap.mmap(-1, self._head_bytes * MOVES_AT_ONCE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._memory = Memory(address, len(self._pages))
        self._payloads = Memory(arena.payload_address(0), arena.slots * self._geometry.stride)
        self._heads: asyncio.LifoQueue[Memory] = asyncio.LifoQueue()
        for index in range(MOVES_AT_ONCE):
            self._heads.put_nowait(Memory(address + index * self._head_bytes, self._head_bytes))
        self._waits: set[asyncio.Task[None]] = set()
        self._moves: set[asyncio.Task[Transferred]] = set()

    async def open(self) -> None:
        """Announces the memory."""
        await self._objects.register(self._memory)
        await self._objects.register(self._payloads)
        self._open = True

    async def close(self) -> None:
        """See ObjectSpace. Idempotent; each move has its deadline."""
        if not self._open:
            return
        self._open = False
        await asyncio.gather(*self._moves, return_exceptions=True)
        for task in self._waits:
            task.cancel()
        await self._objects.forget(self._memory)
        await self._objects.forget(self._payloads)
        self._closed(self)

    def seen(self, keys: Sequence[bytes]) -> int:
        """See ObjectSpace."""
        known = self._known
        return next((n for n, key in enumerate(keys) if not known.seen(key)), len(keys))

    async def find(self, keys: Sequence[bytes], timeout_s: float) -> int:
        """See ObjectSpace. A hole before the end shows at the load."""
        size = self.run_blocks
        runs = [keys[start : start + size] for start in range(0, len(keys) - size + 1, size)]
        low, high = 0, len(runs)
        for index, run in enumerate(runs):
            answer = self._known.there(run[-1])
            if answer is False:
                high = index
                break
            if answer:
                low = index + 1
        try:
            async with asyncio.timeout(timeout_s):
                while low < high and not self._refusal(True):
                    low, high = await self._narrow(runs, low, high, timeout_s)
        except TimeoutError:
            self._failed(f"no answer in {timeout_s:g} s", True)
        except StoreError as exc:
            self._failed(str(exc), exc.away)
        if self._refusal(True):
            return 0
        for run in runs[:low]:
            self._known.learn_run(run)
        return low * size

    async def _narrow(
        self, runs: Sequence[Sequence[bytes]], low: int, high: int, timeout_s: float
    ) -> tuple[int, int]:
        """Asks for a few runs between `low` (all before are there) and `high` (it isn't)."""
        span = high - low
        points = sorted({low + span * k // (ASKED_AT_ONCE + 1) for k in range(ASKED_AT_ONCE)})
        self._counters.asked += len(points)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._ask(runs[point][-1], timeout_s)) for point in points]
        for point, answer in zip(points, asked, strict=True):
            result = answer.result()
            if isinstance(result, StoreError):
                raise result
            if not result:
                return low, point
            low = point + 1
        return low, high

    async def _ask(self, last: bytes, timeout_s: float) -> bool | StoreError:
        try:
            entry = await self._objects.size(self._name(last), timeout_s)
        except StoreError as exc:
            return exc
        there = entry is not None
        self._known.learn(last, there)
        return there

    async def store(self, run: Sequence[Transfer], timeout_s: float) -> Transferred:
        """See ObjectSpace. A run that is there already is not written again.

        There is never a fence: what still reads the arena after a failure makes no object.
        """
        return await self._apart(self._store(run, timeout_s))

    async def load(self, run: Sequence[Transfer], timeout_s: float) -> Transferred:
        """See ObjectSpace. Any blocks of one aligned run, in order, will do."""
        return await self._apart(self._load(run, timeout_s))

    async def erase(self, keys: Sequence[bytes]) -> None:
        """See ObjectSpace. Of a block whose run was never seen here, nothing is known to erase."""
        lasts = dict.fromkeys(self._known.run_of(key) or key for key in keys)
        for last in lasts:
            self._known.learn(last, False)
        if not self._refusal(True):
            await self._delete([self._name(last) for last in lasts])

    async def _apart(self, work: Coroutine[object, object, Transferred]) -> Transferred:
        """Lets the work go on when the caller is cancelled: its memory is in use until it ends."""
        task = asyncio.create_task(work)
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)
        return await asyncio.shield(task)

    async def _store(self, run: Sequence[Transfer], timeout_s: float) -> Transferred:
        started = time.monotonic()
        why = self._refusal(False) or self._unfit(run)
        if not why:
            self._known.learn_run([t.header.key for t in run])
            why = await self._put(run, started + timeout_s)
        if why:
            self._counters.errors += len(run)
        return Transferred([why or None] * len(run), time.monotonic() - started)

    async def _put(self, run: Sequence[Transfer], deadline: float) -> str:
        """Empty, or why not."""
        last = run[-1].header.key
        name, size = self._name(last), object_bytes(len(run), self._geometry)
        there = self._known.there(last)
        if there is None:
            try:
                entry = await self._objects.size(name, _left(deadline))
            except StoreError as exc:
                self._failed(str(exc), exc.away)
                return str(exc)
            # One of another size is none of ours, whoever left it there.
            there = entry is not None and entry.size == size
        if there:
            self._known.learn(last, True)
            self._counters.skipped_blocks += len(run)
            return ""
        head = await self._take_head(deadline)
        if head is None:
            return "timeout: too many moves at once"
        view(head)[:] = pack_head(self.namespace, [t.header for t in run], self._geometry)
        parts = [head, *(self._slot(t.arena_slot) for t in run)]
        moved = await self._objects.put([ObjectPiece(parts, name)], _left(deadline))
        self._give_back(head, moved.fence)
        error = moved.errors[0]
        # After a failure it may be there or not.
        self._known.learn(last, True if error is None else None)
        if error is not None:
            self._blame(error)
            return error
        self._counters.stored_blocks += len(run)
        self._counters.written_bytes += size
        return ""

    async def _load(self, run: Sequence[Transfer], timeout_s: float) -> Transferred:
        started = time.monotonic()
        read = await self._get(run, started + timeout_s)
        done = sum(error is None for error in read.errors)
        self._counters.loaded_blocks += done
        self._counters.errors += len(run) - done
        return Transferred(read.errors, time.monotonic() - started, read.fence, read.headers)

    async def _get(self, run: Sequence[Transfer], deadline: float) -> _Read:
        if why := self._refusal(True):
            return _Read.failed(run, why)
        if (last := self._run_of(run)) is None:
            return _Read.failed(run, f"{MISSING}: the end of its run is not known")
        if (head := await self._take_head(deadline)) is None:
            return _Read.failed(run, "timeout: too many moves at once")
        slots = {t.header.position % self.run_blocks: t.arena_slot for t in run}
        skipped = Memory(SKIP, self._geometry.stride)
        blocks = (
            self._slot(slots[index]) if index in slots else skipped
            for index in range(max(slots) + 1)
        )
        piece = ObjectPiece([head, *blocks], self._name(last))
        moved = await self._objects.get([piece], _left(deadline))
        error = moved.errors[0]
        if error is None:
            read = await asyncio.to_thread(self._verify, bytes(view(head)), run)
            self._counters.read_bytes += piece.length
        else:
            read = _Read.failed(run, error, moved.fence)
        self._give_back(head, moved.fence)
        await self._learn_from(read.errors, last)
        return read

    def _verify(self, head: bytes, run: Sequence[Transfer]) -> _Read:
        """Judges what lies in the arena by what the object says of it. In a thread."""
        try:
            found = unpack_head(head, self.namespace, self.run_blocks, self._geometry)
        except CorruptHeader as exc:
            return _Read.failed(run, f"{CORRUPT}{exc}")
        except OtherRuns as exc:
            return _Read.failed(run, f"{MISSING}: {exc}")
        errors: list[str | None] = []
        headers: list[SlotHeader | None] = []
        for transfer in run:
            why = self._wrong(transfer, found)
            errors.append(why or None)
            header = found[transfer.header.position % self.run_blocks]
            headers.append(header if not why and isinstance(header, SlotHeader) else None)
        return _Read(errors, headers)

    def _wrong(self, transfer: Transfer, found: Sequence[SlotHeader | CorruptHeader]) -> str:
        """What is wrong with one block; empty: nothing."""
        wanted = transfer.header
        index = wanted.position % self.run_blocks
        header = found[index]
        if isinstance(header, CorruptHeader):
            return f"{CORRUPT}{header}"
        before = found[index - 1] if index else None
        parent = before.key if isinstance(before, SlotHeader) else wanted.parent
        if header.state is not SlotState.SEALED or header.key != wanted.key:
            return f"{CORRUPT}another block lies there"
        if header.position != wanted.position or (header.position == 0) != (
            header.parent == NO_KEY
        ):
            return f"{CORRUPT}the block has another place in its chain"
        if parent not in (NO_KEY, header.parent):
            return f"{CORRUPT}the block continues another chain"
        if header.payload_bytes != self._geometry.payload_bytes:
            return f"{CORRUPT}the block has another length"
        if self._arena.checksums(transfer.arena_slot) != header.checksums:
            return f"{CORRUPT}the block's bytes don't fit their checksum"
        if header.expires_ms and header.expires_ms <= time.time() * 1000:
            return f"{MISSING}: the block has expired"
        return ""

    async def _learn_from(self, errors: Sequence[str | None], last: bytes) -> None:
        """Draws the consequences of a load, so that the same is not tried again for nothing."""
        why = next((error for error in errors if error is not None), None)
        answered = why is None or why.startswith((CORRUPT, "short", MISSING))
        self._known.learn(last, why is None if answered else None)
        if why is None:
            self._used(self._name(last))
        elif why.startswith((CORRUPT, "short")):
            self._counters.corrupt += sum(e is not None and e.startswith(CORRUPT) for e in errors)
            log.warning("a remote object is corrupt; removed", object=self._name(last), why=why)
            # While it has the name, no sound one can be stored.
            await self._delete([self._name(last)])
        elif not why.startswith(MISSING):
            self._blame(why)

    async def _delete(self, names: Sequence[str]) -> None:
        try:
            await self._objects.delete(names, _DELETE_S)
        except StoreError as exc:
            self._failed(str(exc), exc.away)

    def _blame(self, error: str) -> None:
        self._failed(error.removeprefix(AWAY), error.startswith((AWAY, "timeout")))

    def _unfit(self, run: Sequence[Transfer]) -> str:
        """Why these blocks are no run; empty: they are one."""
        size = self.run_blocks
        if len(run) != size or run[0].header.position % size:
            return f"refused: not a whole, aligned run of {size} blocks"
        for before, after in pairwise(run):
            if after.header.parent != before.header.key:
                return "refused: the blocks are no chain"
        return ""

    def _run_of(self, run: Sequence[Transfer]) -> bytes | None:
        """Hash of the last block of their run."""
        end = run[-1].header
        if end.position % self.run_blocks == self.run_blocks - 1:
            return end.key
        return self._known.run_of(end.key)

    def _name(self, last: bytes) -> str:
        return f"{self._folder}/{last.hex()}"

    def _slot(self, slot: int) -> Memory:
        return Memory(self._arena.payload_address(slot), self._geometry.stride)

    async def _take_head(self, deadline: float) -> Memory | None:
        """Pages for a head; None: there were none until the deadline."""
        try:
            async with asyncio.timeout(_left(deadline)):
                return await self._heads.get()
        except TimeoutError:
            return None

    def _give_back(self, head: Memory, fence: Awaitable[None] | None) -> None:
        """Lets others have it, once nothing writes or reads it any more."""

        async def wait(fence: Awaitable[None]) -> None:
            await fence
            self._heads.put_nowait(head)

        if fence is None:
            self._heads.put_nowait(head)
        else:
            task = asyncio.create_task(wait(fence))
            self._waits.add(task)
            task.add_done_callback(self._waits.discard)


@dataclass(frozen=True, slots=True)
class _Read:
    """How a load ended, block by block."""

    errors: Sequence[str | None]
    headers: Sequence[SlotHeader | None]
    fence: Awaitable[None] | None = None

    @classmethod
    def failed(
        cls, run: Sequence[Transfer], why: str, fence: Awaitable[None] | None = None
    ) -> _Read:
        return cls([why] * len(run), [None] * len(run), fence)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
