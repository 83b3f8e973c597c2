"""Placements and sessions in the hand of a test of what stands between them. No network."""

import asyncio
from collections.abc import Callable, Sequence

from services.common.cards import Holder
from services.common.errors import Unavailable
from services.common.ids import AttemptId, new_id
from services.gateway.ports import (
    Ask,
    Ended,
    Inbox,
    PlacedBy,
    Placement,
    Transfer,
    Work,
    WorkerLost,
)


def placement(worker: str, prefill: str = "", *, cached: int = 0, first: int = 0) -> Placement:
    """As routers make them: `prefill` names the other worker of a pair. `cached` and `first` are
    predicted of the two.
    """
    return Placement(
        attempt_id=AttemptId(new_id(f"att-{worker}")),
        worker=Holder(worker, 1),
        address=f"{worker}:1",
        predicted_cached_tokens=cached,
        placed_by=PlacedBy.ROUTER,
        prefill=placement(prefill, cached=first) if prefill else None,
    )


class FakePlacer:
    """Answers with the next of `answers`; the last one is given on and on."""

    def __init__(self, *answers: Placement) -> None:
        self.answers = list(answers)
        self.asks: list[Ask] = []
        self.released: list[tuple[Placement, bool]] = []
        """Placements given back, and whether their workers were unreachable."""

    async def place(self, ask: Ask) -> Placement:
        self.asks.append(ask)
        if not self.answers:
            raise Unavailable("nobody", reason="NO_WORKER")
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def release(self, placement: Placement, *, unreachable: bool = False) -> None:
        self.released.append((placement, unreachable))


class FakePool:
    """Sessions that say what the test lets them say."""

    def __init__(self) -> None:
        self.started: list[tuple[str, Work]] = []
        """Worker and sequence, in order."""
        self.running: dict[str, Work] = {}
        self.let_go: list[str] = []
        """Names of KV that nobody was given."""
        self.unreachable: dict[str, WorkerLost] = {}
        self.connecting: dict[str, asyncio.Event] = {}
        """Workers whose connection waits for an event."""
        self.writing = True
        """False: what is started stays in the queue, and no worker hears of it."""
        self.waiting: list[str] = []
        """Workers whose connection was asked for."""
        self._inboxes: dict[str, Inbox] = {}
        self._transfers: dict[str, Transfer] = {}
        self._changed = asyncio.Event()

    async def start(self, placement: Placement, works: Sequence[Work], inbox: Inbox) -> None:
        worker = placement.worker.id
        self.waiting.append(worker)
        self._changed.set()
        if worker in self.connecting:
            await self.connecting[worker].wait()
        if worker in self.unreachable:
            raise self.unreachable[worker]
        for work in works:
            self.started.append((worker, work))
            self.running[work.request_id] = work
            self._inboxes[work.request_id] = inbox
            if work.transfer is not None and self.writing:
                work.transfer.given = True
        self._changed.set()

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None and not transfer.given:
            self.let_go.append(transfer.name)
        self._changed.set()

    def say(
        self,
        work: Work,
        *tokens: int,
        cached: int | None = None,
        transferred: int = 0,
        ended: Ended | None = None,
        error: Exception | None = None,
        handle: bool = False,
    ) -> None:
        """News of a sequence; `handle`: its KV is there to be taken."""
        inbox = self._inboxes[work.request_id]
        news = inbox.of(work.request_id)
        news.token_ids += tokens
        if cached is not None:
            news.cached_tokens, news.transferred_tokens = cached, transferred
        news.ended = ended
        news.error = error  # type: ignore[assignment]
        if handle:
            name = f"kv-{work.request_id}"
            news.transfer = Transfer(b"handle", name, len(work.prompt) + len(work.prior))
            self._transfers[work.request_id] = news.transfer
        if ended is not None or error is not None:
            self.running.pop(work.request_id, None)
        inbox.wake(work.request_id, news)

    def prefilled(self, work: Work, *, cached: int = 0) -> None:
        """The good end of a prefill leg."""
        self.say(work, 7, cached=cached, ended=Ended.LENGTH, handle=True)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition` holds; looked at on every start and abort."""
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def next(self, count: int) -> tuple[str, Work]:
        """The sequence that was started as the `count`th, once it is."""
        await self.until(lambda: len(self.started) >= count)
        return self.started[count - 1]
