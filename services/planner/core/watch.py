"""What the planner knows of workers: from records, their event streams, and the time it was heard.

A read model and nothing else: it may be late or incomplete, and then costs a wrong guess. Times of
latencies are those at which the planner heard of their ends. What requests do before a worker
admits them (gateway, a wait at the router) is not seen.

TTFT of a request that runs in two legs is from the prefill leg's admission to the decode leg's
first token; `legs` says how the two are found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from services.common.cards import Role
from services.common.events.model import (
    Batch,
    Event,
    LoadReport,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    Snapshot,
)
from services.planner.core.group import GroupLog, attained
from services.planner.core.measures import (
    DecodeLoad,
    GroupKey,
    GroupMeasures,
    PrefillLoad,
    WorkerInfo,
    WorkerView,
)
from services.planner.core.runs import Running, WorkerRuns
from services.planner.core.targets import Targets
from services.planner.core.windows import Window, quantile_of

_LEAST_BUSY_S = 0.05
"""Busy seconds from which on a rate is taken from them."""
_WIDEST = 3.0
"""Most that a latency may lie above what steps that only decode would make it."""
_SIGMAS = 2.0
"""Standard deviations from which on a change is not chance."""
_GROUP_KEPT_S = 600.0
"""A group without workers is remembered for so long."""


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """How far back figures reach, and when silence means what. Seconds."""

    window_s: float = 20.0
    silent_after_s: float = 3.0
    """A worker not heard for so long counts nowhere until it is heard again."""
    gone_after_s: float = 60.0
    """One without a record that is silent for so long is forgotten."""


@dataclass(slots=True)
class _Worker:
    info: WorkerInfo
    runs: WorkerRuns
    incarnation: int
    heard_at: float = -inf
    recorded: bool = True


class Watch:
    """Workers by id, groups by key. Not thread-safe; the caller brings the time."""

    def __init__(self, config: WatchConfig) -> None:
        self.config = config
        self._workers: dict[str, _Worker] = {}
        self._groups: dict[GroupKey, GroupLog] = {}
        self.orphans = 0
        """Events about requests or workers that aren't known."""

    # Records.

    def record(self, info: WorkerInfo, now: float) -> None:
        """A worker's record is new or has changed."""
        group = self._groups.setdefault(info.group, GroupLog(self.config.window_s, now))
        known = self._workers.get(info.id)
        if known is None:
            runs = WorkerRuns(self.config.window_s)
            self._workers[info.id] = _Worker(info, runs, info.incarnation)
            self._note_pools()
            return
        if known.info.incarnation == info.incarnation and known.info.role != info.role:
            group.changed_at = now
        if known.info.group != info.group:
            known.runs = WorkerRuns(self.config.window_s)
        known.info, known.recorded = info, True
        self._life(known, info.incarnation)
        self._note_pools()

    def record_vanished(self, worker_id: str, incarnation: int) -> None:
        """A hint: it is not moved any more, but counts while it is heard."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.info.incarnation == incarnation:
            worker.recorded = False

    def moved(self, worker_id: str, incarnation: int, role: Role, now: float) -> None:
        """It has taken a new role; its record will follow."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.info.incarnation == incarnation:
            self.record(replace(worker.info, role=role), now)

    def tick(self, now: float) -> tuple[str, ...]:
        """Lets time pass; ids of workers that are forgotten."""
        gone = tuple(
            id
            for id, w in self._workers.items()
            if not w.recorded and w.heard_at < now - self.config.gone_after_s
        )
        for id in gone:
            del self._workers[id]
        if gone:
            self._note_pools()
        used = {w.info.group for w in self._workers.values()}
        for key, group in list(self._groups.items()):
            group.prune(now)
            if key in used:
                group.used_at = now
            elif group.used_at < now - _GROUP_KEPT_S:
                del self._groups[key]
        for worker in self._workers.values():
            worker.runs.prune(now)
        for key, group in self._groups.items():
            group.batches.add(
                now,
                sum(
                    1
                    for w in self._workers.values()
                    if w.info.group == key
                    for _ in w.runs.decoding()
                ),
            )
        return gone

    # Streams.

    def heard(self, worker_id: str, incarnation: int, now: float) -> None:
        """It lives, but its news can't be applied now."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._life(worker, incarnation)
            worker.heard_at = now

    def reset(self, snapshot: Snapshot, now: float) -> None:
        """It has exactly these requests; when the unknown ones came nobody says."""
        worker = self._workers.get(snapshot.publisher)
        if worker is None:
            self.orphans += 1
            return
        self._life(worker, snapshot.incarnation)
        worker.heard_at = now
        runs = worker.runs
        runs.interrupted()
        before = dict(runs.requests)
        there = {r.admitted.attempt_id for r in snapshot.requests}
        for attempt_id in before.keys() - there:
            runs.finish(attempt_id, now)
        for entry in snapshot.requests:
            running = before.get(entry.admitted.attempt_id)
            if running is None:
                running = Running(entry.admitted, None)
                runs.admit(running, now)
            if entry.decoding and running.first_at is None:
                # Its first token was missed: how long that took isn't known.
                running.at = None
                runs.decodes(running, now)
        if snapshot.load is not None:
            runs.report(snapshot.load, None, now)

    def apply(self, batch: Batch, now: float) -> None:
        """What is new, in order and without gaps."""
        worker = self._workers.get(batch.publisher)
        if worker is None:
            self.orphans += len(batch.events)
            return
        self._life(worker, batch.incarnation)
        worker.heard_at = now
        group = self._groups[worker.info.group]
        for event in batch.events:
            self._on_event(worker, group, event, now)

    def _on_event(self, worker: _Worker, group: GroupLog, event: Event, now: float) -> None:
        runs = worker.runs
        match event:
            case RequestAdmitted():
                running = Running(event, now)
                pooled = worker.info.role is Role.PREFILL or not group.pool
                group.admitted(running, now, pooled=pooled)
                runs.admit(running, now)
            case RequestFirstToken(attempt_id=attempt_id):
                found = runs.requests.get(attempt_id)
                if found is None or found.first_at is not None:
                    self.orphans += found is None
                    return
                computed = runs.first_token(
                    found, event.cached_tokens, event.transferred_tokens, now
                )
                group.first_token(found, computed, now)
            case RequestFinished(attempt_id=attempt_id):
                found = runs.finish(attempt_id, now)
                if found is None:
                    self.orphans += 1
                else:
                    group.finished(found, event.output_tokens, now)
            case LoadReport():
                fit = group.fit if worker.info.role is not Role.PREFILL else None
                runs.report(event, fit, now)

    def _note_pools(self) -> None:
        pools = {w.info.group for w in self._workers.values() if w.info.role is Role.PREFILL}
        for key, group in self._groups.items():
            group.pool = key in pools

    def _life(self, worker: _Worker, incarnation: int) -> None:
        """Another incarnation: what is known of the former life's requests is void."""
        if worker.incarnation != incarnation:
            worker.incarnation = incarnation
            worker.runs = WorkerRuns(self.config.window_s)

    # Questions.

    def groups(self) -> tuple[GroupKey, ...]:
        """All that have workers, in a stable order."""
        return tuple(sorted({w.info.group for w in self._workers.values()}))

    def measure(self, key: GroupKey, targets: Targets, now: float) -> GroupMeasures:
        """What a decision needs to know of a group."""
        group = self._groups.get(key)
        if group is None:
            return GroupMeasures(key)
        group.prune(now)
        living = [
            w
            for _, w in sorted(self._workers.items())
            if w.info.group == key
            and w.heard_at >= now - self.config.silent_after_s
            and not w.info.draining
        ]
        for worker in living:
            worker.runs.prune(now)
        q, since = targets.quantile, group.since
        late = sum(
            r.at is not None and now - r.at + (r.lead_s or 0.0) > targets.ttft_s
            for w in living
            for r in w.runs.waiting()
        )
        # Who still waits has waited for so long at least.
        fresh = group.prefill.values(since) + [
            now - r.at
            for w in living
            for r in w.runs.waiting()
            if r.at is not None and r.at >= since and r.to_compute and now - r.at > targets.ttft_s
        ]
        # What a worker that now prefills still decodes is slow, and says nothing of the others.
        decoders = [w for w in living if w.info.role is not Role.PREFILL]
        itl = group.itl.values(since) + _running_itl(decoders, since)
        return GroupMeasures(
            key=key,
            workers=tuple(_view(w) for w in living),
            ttft=attained(group.ttft.values(), targets.ttft_s, q, late=late),
            itl=attained(group.itl.values() + _running_itl(living, -inf), targets.itl_s, q),
            fresh_ttft=len(fresh),
            prefill_high_s=quantile_of(fresh, q),
            handover_s=quantile_of(group.handover.values(since), 0.5) or 0.0,
            fresh_itl=len(itl),
            itl_high_s=quantile_of(itl, q),
            prefill=self._prefill_load(group, living, targets, now),
            decode=self._decode_load(group, living, quantile_of(itl, q), now),
            changed_at=group.changed_at,
        )

    def _prefill_load(
        self, group: GroupLog, living: list[_Worker], targets: Targets, now: float
    ) -> PrefillLoad:
        pool = [w for w in living if w.info.role is Role.PREFILL] or living
        busy = sum(w.runs.prefill_s(now) for w in pool)
        tokens = sum(w.runs.computed.total() for w in pool)
        if busy >= _LEAST_BUSY_S and tokens:
            group.rate = tokens / busy
        sizes = [v for w in pool for v in w.runs.computed.values() if v > 1]
        mean = sum(sizes) / len(sizes) if sizes else 0.0
        squares = sum(v * v for v in sizes) / len(sizes) if sizes else 0.0
        return PrefillLoad(
            rate=group.rate,
            demand=_demand(group.arrivals, now, group.began) * group.uncached,
            pending=sum(w.runs.queued_tokens(group.uncached) for w in pool),
            mean_tokens=mean,
            high_tokens=quantile_of(sizes, targets.quantile) or 0.0,
            variation=squares / mean**2 - 1 if mean else 1.0,
        )

    def _decode_load(
        self, group: GroupLog, living: list[_Worker], itl_high_s: float | None, now: float
    ) -> DecodeLoad:
        pool = [w for w in living if w.info.role is not Role.PREFILL]
        batch = sum(1 for w in pool for _ in w.runs.decoding())
        before = [v for v in group.batches.values(now - self.config.window_s / 2)]
        grown = batch - int(before[0]) if before else 0
        if grown < _SIGMAS * max(1.0, batch) ** 0.5:
            grown = 0
        used = [w.runs.kv_blocks() for w in pool]
        step = group.fit.value()
        spread = 1.0
        if step is not None and itl_high_s is not None and pool:
            usual = max(batch, sum(w.runs.batch_mean() for w in pool)) / len(pool)
            spread = min(_WIDEST, max(1.0, itl_high_s / max(1e-9, step.at(usual))))
        return DecodeLoad(
            step=step,
            batch=batch + grown,
            tokens_s=sum(w.runs.tokens.total() for w in pool) / self._seen_s(group, now),
            spread=spread,
            kv_used=sum(u for u, _ in used),
            kv_worker=sum(t for _, t in used) / len(used) if used else 0.0,
        )

    def _seen_s(self, group: GroupLog, now: float) -> float:
        return max(1.0, min(self.config.window_s, now - group.began))

    def check_invariants(self) -> None:
        """Raises AssertionError when figures contradict each other."""
        for id, worker in self._workers.items():
            assert worker.info.id == id
            assert worker.info.group in self._groups
            worker.runs.check_invariants()
        for group in self._groups.values():
            group.check_invariants()


def _view(worker: _Worker) -> WorkerView:
    runs, info = worker.runs, worker.info
    return WorkerView(
        info=info,
        movable=worker.recorded and bool(info.group.way) and worker.incarnation == info.incarnation,
        active_tokens=sum(r.admitted.prompt_tokens for r in runs.requests.values()),
        hit_tokens=runs.hits.total(),
    )


def _running_itl(living: Iterable[_Worker], since: float) -> list[float]:
    """Estimates for requests that have not ended: the mean step of their worker, by its steps."""
    found: list[float] = []
    for worker in living:
        step_s = worker.runs.step_mean_s(since)
        if step_s is not None:
            found += [step_s] * sum(1 for _ in worker.runs.decoding())
    return found


def _demand(arrivals: Window, now: float, began: float) -> float:
    """Tokens a second; what they rose by within the window is expected to come once more.

    Only a rise that chance does not explain: beyond two standard deviations of random arrivals.
    """
    half = arrivals.length_s / 2
    if now - began < arrivals.length_s:
        return arrivals.total() / max(1.0, now - began)
    late = arrivals.total(now - half)
    early = arrivals.total() - late
    noise = sum(v * v for v in arrivals.values()) ** 0.5
    if abs(late - early) > _SIGMAS * noise:
        # It changes: only the last half tells of now.
        return (late + max(0.0, late - early)) / half
    return (late + early) / arrivals.length_s
