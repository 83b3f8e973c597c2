"""Worker table: who is there, in which life, whether it may be chosen. No blocks, no load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from services.router.core.lives import Life, Liveness, Status, Word

_MODELS_REMEMBERED = 1024


class WorkerRole(StrEnum):
    """What a worker does in a disaggregated cluster. A label: each could do everything."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


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
    kvbm: str = ""
    """Id of the kvbm daemon whose tiers it loads from; empty: none."""
    tenants: frozenset[str] = frozenset()
    """Whom it is reserved for; empty: for all that have no workers of their own."""
    namespace: bytes = b""
    """Digest of what gives its blocks' bytes their meaning."""
    transfer: str = ""
    """How others can take KV from it, and it from them; empty: not at all."""

    def serves(self, name: str) -> bool:
        """Whether `name` is its model or one of its adapters."""
        return name == self.model or name in self.adapters


@dataclass(slots=True)
class Rank:
    """One data-parallel rank of a worker, with this router's counts of it."""

    slot: int
    holder: HolderId
    placements: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Worker(Life):
    """A worker as the table has it."""

    info: WorkerInfo
    ranks: list[Rank] = field(default_factory=list)

    @property
    def described(self) -> bool:
        """Whether `info` is of this life. A life is heard before its record comes; until then
        `info` is the former one's, and may be wrong in everything, the model included.
        """
        return self.info.incarnation == self.incarnation


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

    def status(self, worker: Worker, now: float) -> Status:
        """How a worker is regarded at `now`."""
        return worker.status(worker.info.draining, self._liveness, now)

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
            worker = Worker(
                info=info,
                incarnation=info.incarnation,
                heard_at=now,
                record_incarnation=info.incarnation,
            )
            self._workers[info.id] = worker
            return self._new_life(worker, info.incarnation, now)
        word = worker.recorded(info.incarnation)
        if word is Word.FORMER:
            return Change(worker)
        resized = worker.info.dp_size != info.dp_size
        worker.info = info
        if word is Word.NEXT or resized:
            return self._new_life(worker, info.incarnation, now)
        return Change(worker)

    def record_vanished(self, worker_id: str, incarnation: int) -> None:
        """A discovery record went: a hint only."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.record_vanished(incarnation)

    def heard(self, worker_id: str, incarnation: int, now: float) -> Change | None:
        """A worker's stream spoke. None when that concerns nobody (any more)."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        match worker.heard(incarnation, now):
            case Word.FORMER:
                return None
            case Word.NEXT:
                return self._renumber(worker)
            case Word.PRESENT:
                return Change(worker)

    def refused(self, worker_id: str, incarnation: int, now: float) -> bool:
        """A worker refused a connection (`incarnation` 0: whichever life). True if that is news."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.refuse(incarnation, now)

    def tick(self, now: float) -> list[Change]:
        """Removes workers that are gone."""
        gone = []
        for worker in list(self):
            if worker.gone(worker.info.draining, self._liveness, now):
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
        worker.begin(incarnation, now)
        return self._renumber(worker)

    def _renumber(self, worker: Worker) -> Change:
        removed = tuple(worker.ranks)
        worker.ranks = []
        for dp_rank in range(max(1, worker.info.dp_size)):
            holder = HolderId(worker.info.id, worker.incarnation, dp_rank)
            worker.ranks.append(Rank(self._next_slot, holder))
            self._next_slot += 1
        return Change(worker, tuple(worker.ranks), removed)

    def _remember(self, info: WorkerInfo, now: float) -> None:
        for name in (info.model, *info.adapters):
            self._models.pop(name, None)
            self._models[name] = now
        while len(self._models) > _MODELS_REMEMBERED:
            del self._models[next(iter(self._models))]
