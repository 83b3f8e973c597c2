"""The client of the node's kvbm daemon inside the engine: one thread, never waited for.

It attaches, keeps slots granted ahead, commits in batches, waits for promotions, ends leases, and
attaches anew when the daemon was restarted. Calls are gRPC's own futures: their ends come back into
the thread's queue. (grpc.aio can't serve two loops of one process well, and the worker's shell has
one.) Away, slow or odd: it says so and tries again; requests go on without tiers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc

from services.common.rpc.channel import CHANNEL_OPTIONS
from services.common.rpc.errors import translate
from services.common.telemetry.logging import get_logger
from services.worker.connector.instructions import Ask, Await, Ended, Fill, Instructions
from services.worker.connector.lookup import leased_blocks, lookup_request, terms_of
from services.worker.connector.model import Attachment, Slot
from services.worker.connector.news import (
    Attached,
    Committed,
    Found,
    Gone,
    Hello,
    News,
    Promoted,
)
from services.worker.connector.slots import SlotPool
from services.worker.connector.wire import (
    attach_request,
    commit_request,
    needless,
    release_request,
    result_name,
)

CALL_TIMEOUT_S = 5.0
RETRY_S = (0.1, 2.0)
"""First and longest pause before attaching again."""
GRANT_PAUSE_S = (0.2, 2.0)
"""Shortest and longest pause after fewer slots came than were asked for."""
PROBE_S = 2.0
"""So often an idle link looks whether the daemon is still the one it knew."""
AWAIT_MARGIN_S = 0.05
COMMIT_BATCH = 256
ENDED_LIMIT = 4096
"""Ended leases that may wait for a daemon that is away; older ones expire by themselves."""
INBOX_LIMIT = 16_384
STOP_TIMEOUT_S = 2.0
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Ready:
    owner: int


@dataclass(frozen=True, slots=True)
class _Refused:
    owner: int
    why: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """A call's end, to be handled by the link's thread."""

    then: Callable[[Any], None]
    result: Any


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class Link:
    """The thread and what it shares with the scheduler's: an inbox, a list of news, the slots."""

    def __init__(self, address: str, hello: Hello, *, grant_blocks: int) -> None:
        self.slots = SlotPool()
        self.counts: dict[str, int] = defaultdict(int)
        """Failures by kind. Written by the link's thread alone."""
        self._hello = hello
        self._address = address
        self._grant_blocks = grant_blocks
        self._inbox: queue.Queue[Any] = queue.Queue(INBOX_LIMIT)
        # Of the scheduler's thread when taken, of the link's when added; a deque is safe for that.
        self._news: deque[News] = deque()
        self._thread = threading.Thread(target=self._main, name="kvbm-link", daemon=True)
        # Below: the link's thread only.
        self._stub: Any = None
        self._owner = 0
        self._incarnation = 0
        self._locked = False
        self._attaching = False
        self._failures = 0
        self._told = ""
        self._attach_at_s = 0.0
        self._grant_at_s = 0.0
        self._short = 0
        self._granting = False
        self._held = 0
        self._fills: deque[Fill] = deque()
        self._committing: Sequence[Fill] = ()
        self._commit_at_s = 0.0
        self._ended: deque[Ended] = deque(maxlen=ENDED_LIMIT)
        self._releasing = False
        self._release_at_s = 0.0

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    # Called by the scheduler's thread.

    def send(self, instructions: Instructions) -> None:
        """Hands instructions over; never blocks. Too many: they are dropped, and counted."""
        self._put(instructions)

    def ready(self, owner: int) -> None:
        """The worker side holds the lock and has the arena mapped."""
        self._put(_Ready(owner))

    def refuse(self, owner: int, why: str) -> None:
        """The worker side can't use the arena."""
        self._put(_Refused(owner, why))

    def take_news(self) -> list[News]:
        """What has come since the last call."""
        if not self._news:
            return []
        news: list[News] = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def stop(self) -> None:
        """Gives everything back and ends the thread."""
        self._put(_Stop())
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def _put(self, item: Any) -> None:
        try:
            self._inbox.put_nowait(item)
        except queue.Full:
            self.counts["overflow"] += 1

    # Below: the link's thread.

    def _main(self) -> None:
        with grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel:
            self._stub = kvbm_pb2_grpc.KvbmServiceStub(channel)
            while True:
                try:
                    if not self._turn():
                        return
                except Exception:  # the thread's boundary: without it nothing is saved any more
                    self.counts["errors"] += 1
                    log.exception("the link to kvbm stumbled")
                    self._lose("an error of our own")

    def _turn(self) -> bool:
        """Handles what waits, then does what is due; False at the end."""
        try:
            item = self._inbox.get(timeout=self._pause_s())
        except queue.Empty:
            item = None
        while item is not None:
            match item:
                case _Stop():
                    self._detach()
                    return False
                case _Answer(then, result):
                    then(result)
                case Instructions():
                    self._fills.extend(item.fills)
                    self._ended.extend(item.ended)
                    for order in item.awaits:
                        self._await(order)
                    for ask in item.asks:
                        self._ask(ask)
                case _Ready(owner):
                    if owner == self._owner:
                        self._locked = True
                        self._failures = 0
                        self.slots.open(owner)
                case _Refused(owner, why):
                    if owner == self._owner:
                        self.counts["arena_refused"] += 1
                        log.warning("the arena can't be used", error=why)
                        self._lose(why)
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                item = None
        now_s = time.monotonic()
        self._attach(now_s)
        self._commit(now_s)
        self._grant(now_s)
        self._release(now_s)
        return True

    def _pause_s(self) -> float:
        now_s = time.monotonic()
        due = [now_s + PROBE_S]
        if not self._owner:
            # Waiting for copies to end is not told by anybody.
            due.append(self._attach_at_s if self.slots.quiet else now_s + 0.01)
        elif self._locked:
            if not self._granting and self._held < self._grant_blocks:
                due.append(self._grant_at_s)
            if self._fills and not self._committing:
                due.append(self._commit_at_s)
        if self._ended and not self._releasing:
            due.append(self._release_at_s)
        return max(0.0, min(due) - now_s)

    def _call(
        self,
        method: str,
        request: Any,
        then: Callable[[Any], None],
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Begins a call; `then` gets its answer, or the error, on this thread."""
        future = getattr(self._stub, method).future(request, timeout=timeout_s)

        def done(future: Any) -> None:
            try:
                result = future.result()
            except grpc.RpcError as exc:
                result = translate(exc)
            except Exception as exc:  # cancelled at the end
                result = exc
            # From gRPC's thread; this queue has room for the few calls that can run at once.
            self._put(_Answer(then, result))

        future.add_done_callback(done)

    # Attachment.

    def _attach(self, now_s: float) -> None:
        if self._owner or self._attaching or now_s < self._attach_at_s:
            return
        if self.slots.owner and not self.slots.quiet:
            return
        self._attaching = True
        request = attach_request(self._hello, self.slots.owner)
        self._call("Attach", request, self._attached, timeout_s=2 * CALL_TIMEOUT_S)

    def _attached(self, answer: Any) -> None:
        self._attaching = False
        if isinstance(answer, Exception):
            self._back_off(answer)
            return
        self._owner, self._incarnation = answer.owner, answer.incarnation
        self._held, self._locked, self._granting = 0, False, False
        self._grant_at_s, self._short = 0.0, 0
        attachment = Attachment(
            answer.owner, answer.lock_path, answer.arena_path, bool(answer.verify)
        )
        log.info("attached to kvbm", node=answer.node, arena=answer.arena_path)
        self._news.append(Attached(attachment, answer.node))

    def _back_off(self, why: Any) -> None:
        self._failures += 1
        pause_s = min(RETRY_S[1], RETRY_S[0] * 2 ** min(self._failures - 1, 10))
        self._attach_at_s = time.monotonic() + pause_s
        self.counts["attach_failures"] += 1
        if self._failures == 1 or str(why) != self._told:
            # Away first and without room then, say: the last reason is the one to mend.
            log.warning("kvbm is away; requests run without tiers", error=str(why))
            self._told = str(why)

    def _lose(self, why: Any) -> None:
        """The attachment is void: nothing is committed any more, slots are forgotten."""
        if self._owner:
            log.warning("the attachment to kvbm is void", cause=str(why))
            self.counts["lost"] += 1
        self._owner, self._locked = 0, False
        self.slots.close()
        self._give_up([*self._committing, *self._fills])
        self._fills.clear()
        self._committing = ()
        self._news.append(Gone())
        self._back_off(why)

    def _give_up(self, fills: Sequence[Fill]) -> None:
        lost = {f.key: False for f in fills if f.key}
        if lost:
            self._news.append(Committed(lost))

    def _heard(self, incarnation: int) -> bool:
        """Whether the answer is from the daemon that we are attached to."""
        if self._owner and incarnation != self._incarnation:
            self._lose("the daemon was started anew")
            return False
        return bool(self._owner)

    def _failed(self, exc: Any) -> None:
        """A call about the attachment failed."""
        self.counts["call_failures"] += 1
        reason = getattr(exc, "reason", "")
        if reason in ("NOT_ATTACHED", "NOT_LOCKED", "UNIMPLEMENTED", "INVALID_REQUEST"):
            self._lose(exc)

    def _detach(self) -> None:
        self.slots.close()
        if self._ended:
            self._stub.Release.future(release_request(self._ended), timeout=STOP_TIMEOUT_S)
        if self._owner and self.slots.quiet:
            try:
                self._stub.Detach(pb.DetachRequest(owner=self._owner), timeout=STOP_TIMEOUT_S)
            except grpc.RpcError as exc:
                log.info("kvbm did not hear our farewell", error=translate(exc).message)

    # Slots and commits.

    def _grant(self, now_s: float) -> None:
        idle = now_s >= self._grant_at_s + PROBE_S
        wanted = self._grant_blocks - self._held
        if not self._locked or self._granting or now_s < self._grant_at_s:
            return
        if wanted <= 0 and not idle:
            return
        self._granting = True
        owner = self._owner
        request = pb.GrantRequest(owner=owner, count=max(0, wanted))
        self._call("Grant", request, lambda answer: self._granted(owner, answer))

    def _granted(self, owner: int, answer: Any) -> None:
        if owner != self._owner:
            return
        self._granting = False
        if isinstance(answer, Exception):
            self._wait_for_grants()
            self._failed(answer)
        elif self._heard(answer.incarnation):
            self._take(answer.slots)
            self._wait_for_grants()

    def _wait_for_grants(self) -> None:
        """Asks less and less often while there is less than we want; commits bring some, too."""
        self._short = self._short + 1 if self._held < self._grant_blocks else 0
        pause_s = min(GRANT_PAUSE_S[1], GRANT_PAUSE_S[0] * 2 ** min(max(0, self._short - 1), 10))
        self._grant_at_s = time.monotonic() + pause_s

    def _take(self, slots: Any) -> None:
        self._held += len(slots)
        self.slots.add(self._owner, [Slot(s.index, s.generation) for s in slots])

    def _commit(self, now_s: float) -> None:
        stale = [f for f in self._fills if f.owner != self._owner]
        if stale:
            self._give_up(stale)
            self._fills = deque(f for f in self._fills if f.owner == self._owner)
        if not self._locked or self._committing or not self._fills or now_s < self._commit_at_s:
            return
        count = min(len(self._fills), COMMIT_BATCH)
        batch = [self._fills.popleft() for _ in range(count)]
        self._committing = batch
        grant = max(0, self._grant_blocks - self._held + count)
        request = commit_request(self._owner, batch, grant)
        owner = self._owner
        self._call("Commit", request, lambda answer: self._committed(owner, answer))

    def _committed(self, owner: int, answer: Any) -> None:
        if owner != self._owner:
            return
        batch, self._committing = self._committing, ()
        if isinstance(answer, Exception):
            # It may have been heard: a second time does no harm.
            self._fills.extendleft(reversed(batch))
            self._commit_at_s = time.monotonic() + RETRY_S[0]
            self._failed(answer)
            return
        if not self._heard(answer.incarnation):
            self._give_up(batch)
            return
        self._held -= len(batch)
        results: dict[bytes, bool] = {}
        for fill, result in zip(batch, answer.results, strict=False):
            self.counts[f"commit_{result_name(result)}"] += 1
            if fill.key:
                results[fill.key] = needless(result)
        self._news.append(Committed(results))
        self._take(answer.slots)

    # Leases.

    def _release(self, now_s: float) -> None:
        if not self._ended or self._releasing or now_s < self._release_at_s:
            return
        batch = [self._ended.popleft() for _ in range(min(len(self._ended), COMMIT_BATCH))]
        self._releasing = True

        def released(answer: Any) -> None:
            self._releasing = False
            if isinstance(answer, Exception):
                # Dropped after all if the daemon stays away: leases expire by themselves.
                self.counts["call_failures"] += 1
                self._release_at_s = time.monotonic() + RETRY_S[1]
                room = ENDED_LIMIT - len(self._ended)
                self._ended.extendleft(reversed(batch[:room]))

        self._call("Release", release_request(batch), released)

    def _await(self, order: Await) -> None:
        left_s = order.until_s - time.monotonic()

        def answered(answer: Any) -> None:
            if isinstance(answer, Exception):
                self._news.append(Promoted(order.request, order.lease, None, 0))
                return
            ready = leased_blocks(answer.ready)
            self._news.append(Promoted(order.request, order.lease, ready, 0))

        if left_s <= 0:
            self._news.append(Promoted(order.request, order.lease, None, 0))
            return
        # The answer shall be here when the wait is over.
        wait_s = max(0.0, left_s - AWAIT_MARGIN_S)
        request = pb.AwaitRequest(lease=order.lease, wait_ms=int(wait_s * 1000))
        self._call("Await", request, answered, timeout_s=left_s)

    def _ask(self, ask: Ask) -> None:
        looked_s = time.monotonic()
        left_s = ask.until_s - looked_s

        def answered(answer: Any) -> None:
            terms = None
            if not isinstance(answer, Exception):
                terms = terms_of(answer, ask.terms, ask.skip, looked_s)
            self._news.append(Found(ask.request, terms))

        if left_s <= 0:
            self._news.append(Found(ask.request, None))
            return
        request = lookup_request(
            self._hello.namespace,
            ask.keys,
            skip=ask.skip,
            tenant=ask.terms.tenant,
            recompute_block_s=ask.terms.recompute_block_s,
        )
        # The plan's own deadline bounds the wait; what comes later is given back.
        self._call("Lookup", request, answered)
