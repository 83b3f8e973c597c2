"""Which blocks to load, for each request: a state machine over leases. Time is an argument.

Blocks are named by their number in the prompt; the engine's block ids only pass through. Of each
lease exactly one end goes out, with what was loaded under it, also when nothing was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from services.worker.connector.instructions import Ask, Await, Ended, Instructions
from services.worker.connector.model import LeasedBlock, Loaded, LoadItem, LoadOrder
from services.worker.connector.terms import Lease, Terms

EXPIRY_MARGIN_S = 1.0
"""A lease is not used any more so long before it expires."""


class _State(StrEnum):
    OPEN = "open"
    """The lease, if there is one, may be used."""
    LOADING = "loading"
    SPENT = "spent"
    """There is no lease; another may come by asking again."""


@dataclass(slots=True)
class _Request:
    terms: Terms
    lease: Lease | None
    assumed: int
    """Leading blocks that the engine was believed to hold."""
    state: _State = _State.OPEN
    local: int = 0
    offered: int = 0
    failed: bool = False
    asked_until_s: float | None = None
    may_ask: bool = True
    gone: bool = False


class LoadPlan:
    """The loads of one engine's requests. One thread's only."""

    def __init__(self, ask_s: float) -> None:
        """`ask_s`: longest wait for the answer when kvbm is asked again."""
        self._ask_s = ask_s
        self._requests: dict[str, _Request] = {}
        self.reachable = False
        """Whether kvbm can be asked."""

    def __len__(self) -> int:
        return len(self._requests)

    def arrive(self, id: str, terms: Terms, out: Instructions) -> None:
        """A request came, with what the worker's shell found out about it."""
        self._requests[id] = _Request(terms, terms.lease, terms.assumed)
        self._await(id, terms.lease, out)

    def match(
        self,
        id: str,
        keys: Sequence[bytes],
        usable: int,
        local: int,
        now_s: float,
        out: Instructions,
    ) -> int | None:
        """Blocks that can be loaded after the engine's own `local`; None: ask again soon.

        `usable`: leading blocks whose load would help (never the prompt's last token).
        """
        request = self._requests.get(id)
        if request is None or request.failed or request.state is _State.LOADING:
            return 0
        request.local, request.offered = local, 0
        if local >= usable:
            return 0
        if request.asked_until_s is not None:
            if now_s < request.asked_until_s:
                return None
            request.asked_until_s = None
        if self._ask_again(id, request, keys[:usable], now_s, out):
            return None
        lease = request.lease
        if lease is None or now_s >= lease.expires_s - EXPIRY_MARGIN_S or local < lease.first:
            return 0
        ready = lease.first + len(lease.ready)
        if lease.promoting and now_s < lease.until_s and local < ready + lease.promoting:
            return None
        request.offered = max(0, min(ready, usable) - local)
        return request.offered

    def _ask_again(
        self,
        id: str,
        request: _Request,
        keys: Sequence[bytes],
        now_s: float,
        out: Instructions,
    ) -> bool:
        """Whether the engine has lost blocks since the look-up, and kvbm is asked for them."""
        begins = request.assumed if request.lease is None else request.lease.first
        if request.local >= begins or not request.may_ask or not self.reachable:
            return False
        self._end(request, out)
        request.may_ask = False
        request.state = _State.OPEN
        request.asked_until_s = now_s + self._ask_s
        wanted = tuple(bytes(k) for k in keys)
        out.asks.append(Ask(id, wanted, request.local, request.terms, request.asked_until_s))
        return True

    def found(self, id: str, terms: Terms | None, out: Instructions) -> bool:
        """The answer to an Ask; None: there was none. Whether it came in time to be used."""
        request = self._requests.get(id)
        if request is None or request.gone or request.asked_until_s is None:
            if terms is not None and terms.lease is not None:
                out.ended.append(Ended(terms.lease.id))
            return False
        request.asked_until_s = None
        if terms is None:
            return False
        request.terms, request.lease = terms, terms.lease
        self._await(id, terms.lease, out)
        return True

    def _await(self, id: str, lease: Lease | None, out: Instructions) -> None:
        if lease is not None and lease.promoting:
            out.awaits.append(Await(id, lease.id, lease.until_s))

    def promoted(
        self, id: str, lease: int, ready: tuple[LeasedBlock, ...] | None, promoting: int
    ) -> int | None:
        """News of a lease's promotions; `ready` None: they are not to be heard of any more.

        Returns the number of the first block that was promised and won't come, if there is one.
        """
        request = self._requests.get(id)
        if request is None or request.lease is None or request.lease.id != lease:
            return None
        if request.state is not _State.OPEN:
            return None
        old = request.lease
        if ready is None or len(ready) < len(old.ready):
            ready, promoting = old.ready, 0
        request.lease = replace(old, ready=ready, promoting=promoting)
        came = max(old.first + len(ready) + promoting, request.local)
        return came if came < old.first + len(old.ready) + old.promoting else None

    def missing(self, id: str) -> int | None:
        """Number of the first block that was promised, is needed and has not come, if any."""
        request = self._requests.get(id)
        if request is None or request.lease is None:
            return None
        ready = request.lease.first + len(request.lease.ready)
        came = max(ready, request.local)
        return came if came < ready + request.lease.promoting else None

    def allocated(
        self,
        id: str,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        count: int,
        out: Instructions,
    ) -> LoadOrder | None:
        """The engine has placed a request: `blocks` are its ids, `count` of them to be loaded.

        An order names every block that the engine waits for, also those that can't be loaded.
        """
        request = self._requests.get(id)
        if count == 0:
            if request is not None and request.state is _State.OPEN:
                self._end(request, out)
                request.state = _State.SPENT
            return None
        if request is None or request.lease is None or count > request.offered:
            first = request.local if request is not None else max(0, len(blocks) - count)
            return LoadOrder(id, tuple(blocks[first : first + count]), ())
        request.state = _State.LOADING
        local = request.local
        ready = request.lease.ready[local - request.lease.first :]
        items = tuple(
            LoadItem(blocks[local + i], ready[i].slot, bytes(keys[local + i]), ready[i].checksums)
            for i in range(count)
        )
        return LoadOrder(id, tuple(blocks[local : local + count]), items)

    def loaded(self, id: str, result: Loaded, wanted: int, out: Instructions) -> int | None:
        """A load is over; exactly once for each order, also of a request that has left.

        Returns the number of the first block that failed, None when none did.
        """
        request = self._requests.get(id)
        if request is None:
            return None
        if request.lease is not None and request.state is _State.LOADING:
            base = request.local - request.lease.first
            bad = tuple(base + i for i in result.bad)
            out.ended.append(Ended(request.lease.id, result.good, result.seconds, bad))
            request.lease = None
        request.state, request.offered = _State.SPENT, 0
        if request.gone:
            del self._requests[id]
        if result.good >= wanted:
            return None
        # Whatever it was: this request computes what is left, and asks nobody again.
        request.failed = True
        return request.local + result.good

    def preempted(self, id: str, complete: int) -> None:
        """The engine took a request's `complete` blocks away; they may be in lower tiers."""
        request = self._requests.get(id)
        if request is not None and request.state is not _State.LOADING and not request.failed:
            request.assumed = max(request.assumed, complete)
            request.may_ask = True

    def leave(self, id: str, out: Instructions) -> None:
        """A request has ended, however. A load that runs is still heard of."""
        request = self._requests.get(id)
        if request is None:
            return
        if request.state is _State.LOADING:
            request.gone = True
            return
        self._end(request, out)
        del self._requests[id]

    def _end(self, request: _Request, out: Instructions) -> None:
        if request.lease is not None:
            out.ended.append(Ended(request.lease.id))
            request.lease, request.offered = None, 0

    def check_invariants(self) -> None:
        """Raises AssertionError when the plan contradicts itself."""
        for id, request in self._requests.items():
            assert not request.gone or request.state is _State.LOADING, id
            assert request.lease is None or request.state is not _State.SPENT, id
            assert request.state is not _State.LOADING or request.lease is not None, id
            assert request.offered == 0 or request.lease is not None, id
