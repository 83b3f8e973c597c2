"""What to save and what to load, for each request: the scheduler's side without vLLM.

Events come in, decisions and instructions go out (`take_instructions`), nothing waits. Blocks are
named by their number in the prompt; G1's block ids only pass through. Time is an argument.

Of a lease exactly one release goes out, with what was loaded under it, also when nothing was.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from services.worker.connector.model import (
    LeasedBlock,
    Loaded,
    LoadItem,
    LoadOrder,
    Saved,
    SaveOrder,
    Slot,
)
from services.worker.connector.terms import Lease, Terms

KNOWN_KEYS = 65_536
"""Keys remembered as stored."""
SCAN_BLOCKS = 64
"""Most blocks of one request that a step looks at; the rest follow with later steps."""
EXPIRY_MARGIN_S = 1.0
"""A lease is not used any more so long before it expires."""


class Slots(Protocol):
    """The slots granted to this engine."""

    @property
    def owner(self) -> int:
        """As whom; 0: not attached."""
        ...

    def take(self) -> Slot | None:
        """One to fill; None: there is none now."""
        ...


@dataclass(frozen=True, slots=True)
class Fill:
    """A slot whose copy is over: what it holds now, or that it is given back (no key)."""

    owner: int
    slot: Slot
    key: bytes = b""
    parent: bytes = b""
    position: int = 0
    tenant: str = ""
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease's end: blocks loaded, seconds, and blocks (counted from its first) found bad."""

    lease: int
    loaded: int = 0
    seconds: float = 0.0
    bad: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Await:
    """Tell when the promotions of a request's lease are over, or what is there at `until_s`."""

    request: str
    lease: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """Look a request's blocks up again: the engine holds fewer of them than was assumed."""

    request: str
    keys: tuple[bytes, ...]
    skip: int
    terms: Terms
    until_s: float


@dataclass(slots=True)
class Instructions:
    """What the client of kvbm is to do."""

    fills: list[Fill] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    awaits: list[Await] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.fills or self.ended or self.awaits or self.asks)


@dataclass(frozen=True, slots=True)
class Pick:
    """A block to save now."""

    position: int
    key: bytes
    parent: bytes
    slot: Slot
    tenant: str


class _Load(StrEnum):
    OPEN = "open"
    """The lease, if there is one, may be used."""
    LOADING = "loading"
    SPENT = "spent"


@dataclass(slots=True)
class _Request:
    terms: Terms
    lease: Lease | None
    assumed: int
    cursor: int
    """Blocks before it are stored, or on their way."""
    complete: int = 0
    """Blocks that were complete when last seen."""
    load: _Load = _Load.OPEN
    local: int = 0
    offered: int = 0
    failed: bool = False
    asked_until_s: float | None = None
    may_ask: bool = True
    gone: bool = False


class KnownKeys:
    """Keys that were stored not long ago, with when that was known; the oldest are forgotten."""

    def __init__(self, limit: int = KNOWN_KEYS) -> None:
        self._limit = limit
        self._times: OrderedDict[bytes, float] = OrderedDict()

    def add(self, key: bytes, now_s: float) -> None:
        """Notes that the key is stored."""
        self._times[key] = now_s
        self._times.move_to_end(key)
        if len(self._times) > self._limit:
            self._times.popitem(last=False)

    def since(self, key: bytes, since_s: float) -> bool:
        """Whether it became known after `since_s`."""
        return self._times.get(key, -1.0) >= since_s

    def forget(self, key: bytes) -> None:
        """Notes that the key is not stored."""
        self._times.pop(key, None)

    def __len__(self) -> int:
        return len(self._times)


class Plan:
    """All requests of one engine. One thread's only."""

    def __init__(self, slots: Slots, *, pin_limit: int, ask_s: float = 0.25) -> None:
        """`pin_limit`: most G1 blocks that saves keep at once; `ask_s`: longest wait for an Ask."""
        self._slots = slots
        self._pin_limit = pin_limit
        self._ask_s = ask_s
        self._requests: dict[str, _Request] = {}
        self._jobs: dict[int, tuple[int, tuple[Pick, ...]]] = {}
        self._next_job = 1
        self._saving: set[bytes] = set()
        self._known = KnownKeys()
        self._out = Instructions()
        self.pinned = 0
        """G1 blocks that unfinished saves keep."""
        self.counts: dict[str, float] = defaultdict(float)
        """What happened since somebody last cleared it."""
        self.reachable = False
        """Whether kvbm can be asked."""

    # Loads.

    def arrive(self, id: str, terms: Terms | None) -> None:
        """A request came, with what the worker's shell found out about it."""
        if terms is None:
            terms = Terms()
        lease = terms.lease
        self._requests[id] = _Request(terms, lease, terms.assumed, cursor=terms.stored)
        if lease is not None and lease.promoting:
            self._out.awaits.append(Await(id, lease.id, lease.until_s))

    def match(
        self, id: str, keys: Sequence[bytes], usable: int, local: int, now_s: float
    ) -> int | None:
        """Blocks that can be loaded after the engine's own `local`; None: ask again soon.

        `usable`: leading blocks whose load would help (never the prompt's last token).
        """
        request = self._requests.get(id)
        if request is None or request.failed or request.load is _Load.LOADING:
            return 0
        request.local, request.offered = local, 0
        if local >= usable:
            return 0
        if request.asked_until_s is not None:
            if now_s < request.asked_until_s:
                return None
            request.asked_until_s = None
        if self._ask_again(id, request, keys, usable, local, now_s):
            return None
        lease = request.lease
        if lease is None or now_s >= lease.expires_s - EXPIRY_MARGIN_S or local < lease.first:
            return 0
        if lease.promoting and now_s < lease.until_s:
            more = lease.first + len(lease.ready) + lease.promoting
            if local < more:
                return None
        request.offered = max(0, min(lease.first + len(lease.ready), usable) - local)
        return request.offered

    def _ask_again(
        self,
        id: str,
        request: _Request,
        keys: Sequence[bytes],
        usable: int,
        local: int,
        now_s: float,
    ) -> bool:
        """Whether the engine has lost blocks since the look-up, and kvbm is asked for them."""
        begins = request.assumed if request.lease is None else request.lease.first
        if local >= begins or not request.may_ask or not self.reachable:
            return False
        self._end_unused(request)
        request.may_ask = False
        request.load = _Load.OPEN
        request.asked_until_s = now_s + self._ask_s
        wanted = tuple(bytes(k) for k in keys[:usable])
        self._out.asks.append(Ask(id, wanted, local, request.terms, request.asked_until_s))
        self.counts["asked_again"] += 1
        return True

    def found(self, id: str, terms: Terms | None, now_s: float) -> None:
        """The answer to an Ask; None: there was none."""
        request = self._requests.get(id)
        late = request is None or request.gone or request.asked_until_s is None
        if late or request is None:
            if terms is not None and terms.lease is not None:
                self._out.ended.append(Ended(terms.lease.id))
            return
        request.asked_until_s = None
        if terms is None:
            return
        request.terms, request.lease = terms, terms.lease
        request.cursor = max(request.cursor, terms.stored)
        if terms.lease is not None and terms.lease.promoting:
            self._out.awaits.append(Await(id, terms.lease.id, terms.lease.until_s))

    def promoted(
        self, id: str, lease: int, ready: tuple[LeasedBlock, ...] | None, promoting: int
    ) -> None:
        """News of a lease's promotions; `ready` None: they are not to be heard of any more."""
        request = self._requests.get(id)
        if request is None or request.lease is None or request.lease.id != lease:
            return
        old = request.lease
        if request.load is not _Load.OPEN:
            return
        if ready is None:
            ready, promoting = old.ready, 0
        elif len(ready) < len(old.ready):
            ready = old.ready
        request.lease = Lease(old.id, old.first, ready, promoting, old.until_s, old.expires_s)

    def allocated(
        self, id: str, keys: Sequence[bytes], blocks: Sequence[int], count: int
    ) -> LoadOrder | None:
        """The engine has placed a request: `blocks` are its ids, `count` of them to be loaded.

        An order names every block that the engine waits for, also those that can't be loaded.
        """
        request = self._requests.get(id)
        if count == 0:
            if request is not None and request.load is _Load.OPEN:
                self._end_unused(request)
                request.load = _Load.SPENT
            return None
        if request is None or request.lease is None or count > request.offered:
            self.counts["lost_orders"] += 1
            first = request.local if request is not None else max(0, len(blocks) - count)
            return LoadOrder(id, tuple(blocks[first : first + count]), ())
        request.load = _Load.LOADING
        lease, local = request.lease, request.local
        ready = lease.ready[local - lease.first :]
        items = tuple(
            LoadItem(
                blocks[local + i], ready[i].slot, bytes(keys[local + i]), tuple(ready[i].checksums)
            )
            for i in range(count)
        )
        return LoadOrder(id, tuple(blocks[local : local + count]), items)

    def loaded(self, id: str, result: Loaded, wanted: int, now_s: float) -> None:
        """A load is over; exactly once for each order, also of a request that has left."""
        request = self._requests.get(id)
        self.counts["loads"] += 1
        self.counts["loaded_blocks"] += result.good
        self.counts["failed_blocks"] += wanted - result.good
        self.counts["bad_blocks"] += len(result.bad)
        self.counts["load_seconds"] += result.seconds
        if request is None:
            return
        if request.lease is not None and request.load is _Load.LOADING:
            base = request.local - request.lease.first
            bad = tuple(base + i for i in result.bad)
            self._out.ended.append(Ended(request.lease.id, result.good, result.seconds, bad))
            request.lease = None
        request.load = _Load.SPENT
        if result.good < wanted:
            # Whatever it was: this request computes what is left, and asks nobody again.
            request.failed = True
            request.cursor = min(request.cursor, request.local + result.good)
        if request.gone:
            del self._requests[id]

    def preempted(self, id: str) -> None:
        """The engine took a request's blocks away; what it had may be in G2."""
        request = self._requests.get(id)
        if request is not None and request.load is not _Load.LOADING and not request.failed:
            request.assumed = max(request.assumed, request.complete)
            request.may_ask = True

    def leave(self, id: str) -> None:
        """A request has ended, however. A load that runs is still heard of."""
        request = self._requests.get(id)
        if request is None:
            return
        self.counts["skipped_blocks"] += max(0, request.complete - request.cursor)
        if request.load is _Load.LOADING:
            request.gone = True
            return
        self._end_unused(request)
        del self._requests[id]

    def _end_unused(self, request: _Request) -> None:
        if request.lease is not None:
            self._out.ended.append(Ended(request.lease.id))
            request.lease = None

    # Saves.

    def due(self, id: str, complete: int) -> bool:
        """Whether a request's `complete` leading blocks hold some that could be saved now."""
        request = self._requests.get(id)
        if request is None:
            return False
        request.complete = complete
        return request.cursor < complete and self.pinned < self._pin_limit

    def pick(self, id: str, keys: Sequence[bytes], holds: Callable[[int], bool]) -> list[Pick]:
        """Blocks of a request to save with this step, in order, each with its slot.

        `holds`: whether the engine has the block of that number under its hash.
        """
        request = self._requests[id]
        picks: list[Pick] = []
        since_s = request.terms.looked_s
        end = min(request.complete, request.cursor + SCAN_BLOCKS)
        for position in range(request.cursor, end):
            key = bytes(keys[position])
            if not self._known.since(key, since_s) and key not in self._saving:
                if self.pinned >= self._pin_limit or not holds(position):
                    break
                slot = self._slots.take()
                if slot is None:
                    break
                parent = bytes(keys[position - 1]) if position else b""
                picks.append(Pick(position, key, parent, slot, request.terms.tenant))
                self._saving.add(key)
                self.pinned += 1
            request.cursor = position + 1
        return picks

    def begin_save(self, picks: Sequence[Pick], blocks: Sequence[int]) -> SaveOrder:
        """The order for a step's picks, which lie in the engine's `blocks`."""
        job, self._next_job = self._next_job, self._next_job + 1
        self._jobs[job] = (self._slots.owner, tuple(picks))
        return SaveOrder(job, tuple(blocks), tuple(p.slot.index for p in picks))

    def saved(self, job: int, result: Saved | None) -> int:
        """A save is over (None: nothing was copied). Returns how many G1 blocks are free again."""
        owner, picks = self._jobs.pop(job)
        self.pinned -= len(picks)
        checksums = result.checksums if result is not None else (None,) * len(picks)
        if result is not None:
            self.counts["save_seconds"] += result.seconds
        for pick, checksum in zip(picks, checksums, strict=True):
            if checksum is None:
                self._saving.discard(pick.key)
                self.counts["unsaved_blocks"] += 1
                self._out.fills.append(Fill(owner, pick.slot))
                continue
            self.counts["saved_blocks"] += 1
            self._out.fills.append(
                Fill(
                    owner,
                    pick.slot,
                    pick.key,
                    pick.parent,
                    pick.position,
                    pick.tenant,
                    checksum,
                )
            )
        return len(picks)

    def committed(self, results: Mapping[bytes, bool], now_s: float) -> None:
        """What became of fills: by key, whether there is no need to save it again."""
        for key, stored in results.items():
            self._saving.discard(key)
            if stored:
                self._known.add(key, now_s)
            else:
                self._known.forget(key)

    @property
    def jobs(self) -> int:
        """Saves whose end is not known yet."""
        return len(self._jobs)

    @property
    def requests(self) -> int:
        """Requests that are known, or whose load runs."""
        return len(self._requests)

    def take_instructions(self) -> Instructions | None:
        """What is to be done since the last call, if anything."""
        if not self._out:
            return None
        out, self._out = self._out, Instructions()
        return out

    def check_invariants(self) -> None:
        """Raises AssertionError when the plan contradicts itself."""
        kept = sum(len(picks) for _, picks in self._jobs.values())
        assert self.pinned == kept, f"{self.pinned} blocks pinned, {kept} in jobs"
        assert self.pinned <= self._pin_limit
        for id, request in self._requests.items():
            assert not request.gone or request.load is _Load.LOADING, id
            assert request.lease is None or request.load is not _Load.SPENT, id
            assert request.offered == 0 or request.lease is not None or request.failed, id
