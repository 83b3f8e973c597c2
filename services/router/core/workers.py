"""Worker table: who is there, in which life, whether it may be chosen. No blocks, load or scores.

Two sources speak of a worker: its discovery record (a hint that it exists, with address and card)
and its own event stream (proof of life). A vanished record removes nobody by itself; silence, a
refused connection or a new incarnation do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

_QUARANTINE_S = 0.5
"""A refused worker must be heard this much later (two heartbeats): older words may be under way."""
_LONGEST_QUARANTINE_S = 10.0
_STRIKES_FORGOTTEN_S = 60.0
_OLD_LIVES = 8
_MODELS_REMEMBERED = 1024


class WorkerRole(StrEnum):
    """What a worker does in a disaggregated cluster."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerStatus(StrEnum):
    """How the router regards a worker."""

    JOINING = "joining"
    """Known; what it holds is not."""
    READY = "ready"
    SUSPECT = "suspect"
    """Silent: avoided while others are there; its blocks are kept."""
    UNREACHABLE = "unreachable"
    """Refused a connection: out of choice until it is heard again; its blocks are kept."""
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class HolderId:
    """One data-parallel rank of one life of a worker."""

    id: str
    incarnation: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker's record says; tokens and blocks as units, 0 where not known."""

    id: str
    incarnation: int
    address: str
    model: str
    block_size: int
    total_blocks: int = 0
    max_model_len: int = 0
    vocab_size: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Adapter names and the paths they were loaded from."""
    labels: Mapping[str, str] = field(default_factory=dict)
    role: WorkerRole = WorkerRole.BOTH
    draining: bool = False
    dp_size: int = 1

    def serves(self, name: str) -> bool:
        """Whether `name` is its model or one of its adapters."""
        return name == self.model or name in self.adapters


@dataclass(frozen=True, slots=True)
class Liveness:
    """When silence means what, in seconds."""

    suspect_after_s: float = 1.0
    gone_after_s: float = 30.0
    remember_model_s: float = 300.0
    """How long a model without workers is "no worker now" rather than "no such model"."""


@dataclass(slots=True)
class Rank:
    """One data-parallel rank of a worker, with this router's counts of it."""

    slot: int
    holder: HolderId
    placements: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Worker:
    """A worker as the table has it."""

    info: WorkerInfo
    incarnation: int
    heard_at: float
    record_incarnation: int | None
    """Incarnation in its discovery record; None when the record vanished."""
    ranks: list[Rank] = field(default_factory=list)
    sequence: int = 0
    known: bool = False
    """Whether a snapshot of this life was taken."""
    refused: bool = False
    """Whether it refused a connection and was not heard again since."""
    refused_at: float = 0.0
    strikes: int = 0
    """Refusals in a row; each doubles the time it must wait."""
    old_lives: deque[int] = field(default_factory=lambda: deque(maxlen=_OLD_LIVES))

    @property
    def starting(self) -> bool:
        """Whether this life has only been heard so far.

        A worker's ports are open long before its engine is ready; then come snapshot and record.
        """
        return not self.known and self.record_incarnation != self.incarnation

    @property
    def heard_since_refusal(self) -> bool:
        """Whether it spoke after it refused a connection, too late for words under way then."""
        return self.heard_at - self.refused_at >= _QUARANTINE_S

    def silence_s(self, now: float) -> float:
        """Seconds since it was last heard (or appeared)."""
        return max(0.0, now - self.heard_at)


@dataclass(frozen=True, slots=True)
class Change:
    """Slots that came and went with an event; whoever keeps something by slot follows it."""

    worker: Worker
    added: tuple[Rank, ...] = ()
    removed: tuple[Rank, ...] = ()


class WorkerTable:
    """Workers by id. Slots number their ranks, one for each life, never used twice."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._workers: dict[str, Worker] = {}
        self._next_slot = 0
        self._models: dict[str, float] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: str) -> Worker | None:
        """The worker of that id, if it is known."""
        return self._workers.get(worker_id)

    def status(self, worker: Worker, now: float) -> WorkerStatus:
        """How a worker is regarded at `now`."""
        if worker.info.draining:
            return WorkerStatus.DRAINING
        if worker.refused:
            return WorkerStatus.UNREACHABLE
        if worker.silence_s(now) > self._liveness.suspect_after_s:
            return WorkerStatus.SUSPECT
        return WorkerStatus.READY if worker.known else WorkerStatus.JOINING

    def remembers(self, model: str, now: float) -> bool:
        """Whether `model` has, or lately had, a worker."""
        if any(w.info.serves(model) for w in self):
            return True
        seen = self._models.get(model)
        return seen is not None and now - seen <= self._liveness.remember_model_s

    # Events.

    def record(self, info: WorkerInfo, now: float) -> Change:
        """A discovery record came or changed."""
        self._remember(info, now)
        worker = self._workers.get(info.id)
        if worker is None:
            worker = Worker(info, info.incarnation, now, info.incarnation)
            self._workers[info.id] = worker
            return self._new_life(worker, info.incarnation, now)
        news = worker.record_incarnation != info.incarnation
        worker.record_incarnation = info.incarnation
        if info.incarnation in worker.old_lives:
            # A late record of a life that has ended; the living one will write its own.
            return Change(worker)
        resized = worker.info.dp_size != info.dp_size
        worker.info = info
        if (news and info.incarnation != worker.incarnation) or resized:
            return self._new_life(worker, info.incarnation, now)
        return Change(worker)

    def record_vanished(self, worker_id: str, incarnation: int) -> None:
        """A discovery record went: a hint only."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.record_incarnation == incarnation:
            worker.record_incarnation = None

    def heard(self, worker_id: str, incarnation: int, now: float) -> Change | None:
        """A worker's stream spoke. None when that concerns nobody (any more)."""
        worker = self._workers.get(worker_id)
        if worker is None or incarnation in worker.old_lives:
            return None
        change = Change(worker)
        if incarnation != worker.incarnation:
            change = self._new_life(worker, incarnation, now)
        worker.heard_at = now
        if worker.refused:
            wait = min(_QUARANTINE_S * 2.0 ** (worker.strikes - 1), _LONGEST_QUARANTINE_S)
            worker.refused = now - worker.refused_at < wait
        return change

    def answered(self, worker: Worker, sequence: int) -> None:
        """A worker answered a call with its snapshot: it can be reached."""
        worker.known = True
        worker.sequence = sequence
        worker.refused = False

    def refused(self, worker_id: str, incarnation: int, now: float) -> bool:
        """A worker refused a connection (`incarnation` 0: whichever life). True if that is news."""
        worker = self._workers.get(worker_id)
        if worker is None or incarnation not in (0, worker.incarnation):
            return False
        if worker.refused:
            return False
        if now - worker.refused_at > _STRIKES_FORGOTTEN_S:
            worker.strikes = 0
        worker.strikes = min(worker.strikes + 1, 16)
        worker.refused, worker.refused_at = True, now
        return True

    def tick(self, now: float) -> list[Change]:
        """Removes those without a record who are silent for long.

        A short silence will do for one that refused a connection or said that it was leaving.
        """
        gone = []
        for worker in list(self):
            if worker.record_incarnation is not None:
                continue
            leaving = worker.refused or worker.info.draining
            limit = self._liveness.suspect_after_s if leaving else self._liveness.gone_after_s
            if worker.silence_s(now) > limit:
                del self._workers[worker.info.id]
                self._remember(worker.info, now)
                gone.append(Change(worker, removed=tuple(worker.ranks)))
        return gone

    def check_invariants(self) -> None:
        """Raises AssertionError when the table contradicts itself."""
        slots = [rank.slot for worker in self for rank in worker.ranks]
        assert len(slots) == len(set(slots))
        assert all(slot < self._next_slot for slot in slots)
        for worker_id, worker in self._workers.items():
            assert worker.info.id == worker_id
            assert worker.incarnation not in worker.old_lives
            assert [r.holder.dp_rank for r in worker.ranks] == list(range(len(worker.ranks)))
            assert all(r.holder.incarnation == worker.incarnation for r in worker.ranks)
        assert len(self._models) <= _MODELS_REMEMBERED

    def _new_life(self, worker: Worker, incarnation: int, now: float) -> Change:
        removed = tuple(worker.ranks)
        if worker.incarnation != incarnation:
            worker.old_lives.append(worker.incarnation)
        worker.incarnation = incarnation
        worker.heard_at = now
        worker.known = False
        worker.sequence = 0
        worker.refused = False
        worker.strikes = 0
        worker.ranks = []
        for dp_rank in range(max(1, worker.info.dp_size)):
            holder = HolderId(worker.info.id, incarnation, dp_rank)
            worker.ranks.append(Rank(self._next_slot, holder))
            self._next_slot += 1
        return Change(worker, tuple(worker.ranks), removed)

    def _remember(self, info: WorkerInfo, now: float) -> None:
        for name in (info.model, *info.adapters):
            self._models.pop(name, None)
            self._models[name] = now
        while len(self._models) > _MODELS_REMEMBERED:
            del self._models[next(iter(self._models))]
