"""What the planner knows of workers: from records, their event streams, and the time it was heard.

A read model and nothing else: it may be late or incomplete, and then costs a wrong guess. Times of
latencies are those at which the planner heard of their ends. What requests do before a worker
admits them (gateway, a wait at the router) is not seen.

TTFT of a request that runs in two legs is from the prefill leg's admission to the decode leg's
first token; `legs` says how the two are found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from services.planner.core.group import GroupLog
from services.planner.core.measures import GroupKey, GroupMeasures, WorkerInfo
from services.planner.core.measuring import measured
from services.planner.core.runs import Running, Worker, WorkerRuns
from services.planner.core.targets import Targets

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


class Watch:
    """Workers by id, groups by key. Not thread-safe; the caller brings the time."""

    def __init__(self, config: WatchConfig) -> None:
        self.config = config
        self._workers: dict[str, Worker] = {}
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
            self._workers[info.id] = Worker(info, runs, info.incarnation)
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

    def _on_event(self, worker: Worker, group: GroupLog, event: Event, now: float) -> None:
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

    def _life(self, worker: Worker, incarnation: int) -> None:
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
        return measured(key, group, living, targets, now)

    def check_invariants(self) -> None:
        """Raises AssertionError when figures contradict each other."""
        for id, worker in self._workers.items():
            assert worker.info.id == id
            assert worker.info.group in self._groups
            worker.runs.check_invariants()
        for group in self._groups.values():
            group.check_invariants()
