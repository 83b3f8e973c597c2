"""What the pipeline needs of the outside: a placement, a worker for a sequence, and its news."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from services.common.cards import Holder, Role
from services.common.errors import ForebayError, Unavailable
from services.common.ids import AttemptId, BlockKey
from services.gateway.core.logprobs import TokenLogprobs
from services.gateway.core.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client says of where its request shall run."""

    worker: str = ""
    """The only worker that will do; empty: any."""
    rank: int | None = None
    """The only data-parallel rank that will do."""
    excluded: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)
    session: str = ""
    """Whose requests shall go to one worker."""


NO_WISHES = Wishes()


@dataclass(frozen=True, slots=True)
class Ask:
    """A question for a placement. `keys` are the full blocks of prompt and prior output, `tokens`
    counts both.
    """

    model: str
    block_size: int
    keys: Sequence[BlockKey]
    tokens: int
    request_id: str = ""
    expected_output: int = 0
    tenant: str = ""
    priority: int = 0
    deadline_ms: int = 0
    """So long its client waits on; 0: not known."""
    admitted: bool = False
    """Whether it was placed before and failed there."""
    sequences: int = 1
    whole: bool = False
    """True: one worker shall prefill and decode it."""
    excluded: frozenset[str] = frozenset()
    wishes: Wishes = NO_WISHES
    trace: Mapping[str, str] = field(default_factory=dict)
    """traceparent and tracestate."""


class PlacedBy(StrEnum):
    """Who decided."""

    ROUTER = "router"
    FALLBACK = "fallback"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request shall run. `attempt_id` names it in the worker's events."""

    attempt_id: AttemptId
    worker: Holder
    address: str
    predicted_cached_tokens: int
    placed_by: PlacedBy
    prefill: Placement | None = None
    """Where its prompt shall be computed first, under an attempt id of its own; None: here."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that the gateway itself could choose, and our own sequences on it."""

    worker: Holder
    address: str
    connected: bool
    in_flight: int
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the worker's record."""
    role: Role = Role.BOTH


class Placer(Protocol):
    """Decides which worker serves a request."""

    async def place(self, ask: Ask) -> Placement:
        """A placement. Raises Unavailable (NO_WORKER), Overloaded, NotFound."""
        ...

    def release(self, placement: Placement, *, unreachable: bool = False) -> None:
        """Gives back a placement that never reached its worker; `unreachable`: the worker refused
        us.
        """
        ...


class WorkerLost(Unavailable):
    """The connection to a worker is gone, or could not be had; what ran there may run elsewhere."""

    default_reason = "WORKER_LOST"

    def __init__(self, message: str, *, refused: bool = False, reason: str = "") -> None:
        super().__init__(message, reason=reason)
        self.refused = refused


class Ended(StrEnum):
    """Why the worker ended a sequence."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Transfer:
    """KV of a prompt that a prefill worker keeps until one other worker has taken it."""

    handle: bytes
    """What that worker needs to know; passed on unchanged."""
    name: str
    """By which the prefill worker knows it, to let go of it."""
    tokens: int
    """Prompt and prior output whose KV it is."""
    given: bool = False
    """True from when a worker was told of it: that one answers for it then."""


@dataclass(slots=True)
class News:
    """What a worker said of one sequence since we last looked: frames merged, in order."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int | None = None
    transferred_tokens: int = 0
    """How many of the cached ones came from the worker of the prefill leg."""
    transfer: Transfer | None = None
    """With the end of a prefill leg."""
    ended: Ended | None = None
    stop_token_id: int | None = None
    error: ForebayError | None = None
    """With ERROR; or a WorkerLost, without any `ended`."""


class Inbox:
    """News of one client request's sequences, by their request id. One reader, on the loop's
    thread.

    Nothing in it can grow beyond what the sequences may produce (max_tokens), so a slow reader
    holds up nobody else.
    """

    def __init__(self, *, patient: bool = False) -> None:
        """`patient`: the reader is woken by a sequence's first news and its last, not by all."""
        self._news: dict[str, News] = {}
        self._arrived = asyncio.Event()
        self._patient = patient
        self._begun: set[str] = set()

    def wake(self, request_id: str, news: News) -> None:
        """Tells the reader of `news`, after something was added to it."""
        if self._patient and news.ended is None and news.error is None:
            if request_id in self._begun:
                return
            self._begun.add(request_id)
        self._arrived.set()

    def of(self, request_id: str) -> News:
        """The news to add to, of one sequence; `wake` the reader afterwards."""
        news = self._news.get(request_id)
        if news is None:
            news = self._news[request_id] = News()
        return news

    async def take(self) -> dict[str, News]:
        """All that came since the last call; waits for something."""
        await self._arrived.wait()
        self._arrived.clear()
        news, self._news = self._news, {}
        return news


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence for a worker."""

    request_id: str
    attempt_id: str
    model: str
    prompt: Sequence[int]
    prior: Sequence[int]
    sampling: Sampling
    tenant: str = ""
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    deadline_ms: int = 0
    client_request_id: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    """traceparent and tracestate."""
    prefill_only: bool = False
    """It ends with its first token, and its worker keeps the KV: a prefill leg."""
    transfer: Transfer | None = None
    """KV that its worker is to take instead of computing it."""


class WorkerPool(Protocol):
    """The sessions with all workers."""

    async def start(self, placement: Placement, works: Sequence[Work], inbox: Inbox) -> None:
        """Sends sequences to their worker, all or none; their news arrive in `inbox`. Raises
        WorkerLost.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends a sequence that runs somewhere, or lets go of the KV that it left as a prefill leg
        and that no worker was given. No news of it arrive any more. Idempotent, never blocks;
        called once at least for every sequence that was started.
        """
        ...
