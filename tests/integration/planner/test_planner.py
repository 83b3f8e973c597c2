"""Planners on a real etcd, with workers that tell, and that take roles, over real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from services.common.cards import Instance, Role
from services.common.discovery import Discovery, open_discovery
from services.common.errors import Unavailable
from services.common.events.model import RequestAdmitted, RequestFirstToken
from services.common.ids import AttemptId
from services.common.lifecycle import Lifecycle, Phase
from services.common.rpc.channel import open_channel
from services.planner import app
from services.planner.adapters.election import JOB, Election
from services.planner.config import PlannerSettings
from tests.fakes.role_worker import RoleWorker, role_worker
from tests.support.etcd import Etcd
from tests.support.polling import until

LEASE_S = 5.0


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@dataclass
class Running:
    """A planner in this process."""

    life: Lifecycle
    task: asyncio.Task[None]
    file: Path

    @property
    def ready(self) -> dict[str, Any]:
        return dict(json.loads(self.file.read_text()))

    async def metrics(self) -> dict[tuple[str, ...], float]:
        """Values by name and label values, in the order of labels' names."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://{self.ready['metrics_address']}/metrics")).text
        return {
            (
                s.name.removeprefix("forebay_planner_"),
                *(s.labels[k] for k in sorted(s.labels)),
            ): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
            if s.name.startswith("forebay_planner_")
        }

    async def active(self) -> bool:
        return (await self.metrics())[("active",)] == 1

    async def kill(self) -> None:
        """As kill -9 leaves things: nothing is given up."""
        self.task.cancel()
        await asyncio.wait({self.task})


class Stage:
    def __init__(self, etcd: Etcd, folder: Path, stack: AsyncExitStack) -> None:
        self.etcd, self.folder, self.stack = etcd, folder, stack
        self.discovery: Discovery | None = None

    def settings(self, name: str, **changes: Any) -> PlannerSettings:
        defaults: dict[str, Any] = {
            "etcd_endpoints": (self.etcd.endpoint,),
            "cluster": self.folder.name,
            "port": 0,
            "metrics_port": 0,
            "id": name,
            "lease_ttl_s": LEASE_S,
            "interval_s": 0.1,
            "ttft_s": 0.5,
            "gap_s": 0.0,
            "ready_file": str(self.folder / f"{name}.json"),
        }
        return PlannerSettings(**defaults | changes)

    async def planner(self, name: str, **changes: Any) -> Running:
        settings, life = self.settings(name, **changes), Lifecycle()
        task = asyncio.create_task(app.main(settings, life))
        running = Running(life, task, Path(settings.ready_file))

        async def stop() -> None:
            life.stop()
            await asyncio.wait({task}, timeout=15)

        self.stack.push_async_callback(stop)

        async def ready() -> bool:
            assert not task.done() or task.exception() is None, task.exception()
            return life.phase is Phase.READY

        await until(ready, within_s=15, what=f"ready {name}")
        return running

    async def worker(self, name: str, role: Role, **more: Any) -> RoleWorker:
        if self.discovery is None:
            self.discovery = await self.stack.enter_async_context(
                open_discovery(self.settings("t"))
            )
        discovery = self.discovery

        def registered(instance: Instance) -> Any:
            return discovery.registered(instance)

        return await self.stack.enter_async_context(role_worker(name, role, registered, **more))


@pytest.fixture
async def stage(etcd: Etcd, tmp_path: Path) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        yield Stage(etcd, tmp_path, stack)


async def drown(worker: RoleWorker) -> None:
    """Prompts wait at it, for longer than the target, at a rate that was measured."""
    publish = worker.publisher.publish
    publish([RequestAdmitted(AttemptId("a"), 10_000, 1, prefill_only=True)])
    await asyncio.sleep(0.1)  # a rate takes time
    publish([RequestFirstToken(AttemptId("a"), 0)])
    publish([RequestAdmitted(AttemptId(f"b{i}"), 50_000, 1, prefill_only=True) for i in range(20)])


async def all_heard(planner: Running, prefill: int, decode: int) -> None:
    """Returns when all their streams are whole, and their roles as said."""

    async def snapshots() -> float:
        return (await planner.metrics())[("snapshots_total",)]

    await until(snapshots, lambda n: n >= prefill + decode, within_s=10, what="snapshots")

    async def workers() -> tuple[float, float]:
        seen = await planner.metrics()
        return seen.get(("workers", "m", "prefill"), 0), seen.get(("workers", "m", "decode"), 0)

    await until(workers, lambda w: w == (prefill, decode), within_s=10, what="workers")


async def test_a_drowned_prefill_worker_gets_help(stage: Stage) -> None:
    prefill = await stage.worker("p0", Role.PREFILL)
    decodes = [await stage.worker(f"d{i}", Role.DECODE) for i in range(2)]
    planner = await stage.planner("one")
    await all_heard(planner, 1, 2)
    await drown(prefill)

    async def roles() -> list[Role]:
        return [w.instance.role for w in decodes]

    await until(roles, lambda r: r.count(Role.PREFILL) == 1, within_s=10, what="move")
    await all_heard(planner, 2, 1)  # as the record says
    seen = await planner.metrics()
    # Labels by their names' order: from, model, to.
    assert seen[("moves_total", "decode", "m", "prefill")] == 1
    # The last one that decodes stays, whatever waits.
    rounds = seen.get(("decisions_total", "m", "helpless"), 0)

    async def helpless() -> float:
        return (await planner.metrics()).get(("decisions_total", "m", "helpless"), 0)

    await until(helpless, lambda n: n >= rounds + 5, within_s=10, what="decisions")
    assert sum(len(w.calls) for w in decodes) == 1
    assert prefill.calls == []


async def test_health_and_record(stage: Stage) -> None:
    planner = await stage.planner("healthy")
    async with open_channel(planner.ready["address"]) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=5
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    key = f"/forebay/{stage.folder.name}/planner/healthy"

    async def keys() -> list[str]:
        return await asyncio.to_thread(stage.etcd.keys, key)

    assert await until(keys, within_s=5) == [key]


async def test_a_dry_run_moves_nobody(stage: Stage) -> None:
    prefill = await stage.worker("p0", Role.PREFILL)
    decodes = [await stage.worker(f"d{i}", Role.DECODE) for i in range(2)]
    planner = await stage.planner("dry", dry_run=True)
    await all_heard(planner, 1, 2)
    await drown(prefill)

    async def would() -> float:
        return (await planner.metrics()).get(("decisions_total", "m", "dry_run"), 0)

    await until(would, lambda n: n >= 3, within_s=10, what="decisions to move")
    assert all(w.calls == [] for w in decodes)


async def test_who_refuses_is_left_alone(stage: Stage) -> None:
    prefill = await stage.worker("p0", Role.PREFILL)
    decodes = [await stage.worker(f"d{i}", Role.DECODE) for i in range(2)]
    decodes[0].refusal = Unavailable("it drains", reason="DRAINING")
    planner = await stage.planner("patient")
    await all_heard(planner, 1, 2)
    await drown(prefill)

    async def roles() -> list[Role]:
        return [w.instance.role for w in decodes]

    await until(roles, lambda r: r == [Role.DECODE, Role.PREFILL], within_s=10, what="move")
    assert decodes[0].calls == [Role.PREFILL]


async def test_one_of_two_is_active_and_the_other_takes_over(stage: Stage) -> None:
    first = await stage.planner("first")
    await until(first.active, within_s=5, what="active first")
    second = await stage.planner("second")
    await asyncio.sleep(LEASE_S * 0.3)  # two of its tries
    assert await first.active() and not await second.active()
    killed = time.monotonic()
    await first.kill()
    await until(second.active, within_s=LEASE_S + 5, what="active second")
    assert time.monotonic() - killed <= LEASE_S


async def test_one_that_stops_lets_the_other_go_on_at_once(stage: Stage) -> None:
    first = await stage.planner("first", lease_ttl_s=30.0)
    await until(first.active, within_s=5, what="active first")
    second = await stage.planner("second", lease_ttl_s=10.0)
    stopped = time.monotonic()
    first.life.stop()
    await first.task
    await until(second.active, within_s=10, what="active second")
    assert time.monotonic() - stopped < 18.0 / 2  # its claim lasts 18 s


async def test_one_that_lost_its_claim_stops_acting_at_once(stage: Stage) -> None:
    prefill = await stage.worker("p0", Role.PREFILL)
    decodes = [await stage.worker(f"d{i}", Role.DECODE) for i in range(2)]
    # It renews seldom: by its own time it is active for long after it lost its claim.
    planner = await stage.planner("robbed", lease_ttl_s=100.0)
    await until(planner.active, within_s=5, what="active")
    await all_heard(planner, 1, 2)
    assert stage.discovery is not None
    job = f"/forebay-jobs/{stage.folder.name}/{JOB}"
    await asyncio.to_thread(stage.etcd.ctl, "put", job, "somebody")
    await drown(prefill)

    async def lost() -> float:
        return (await planner.metrics()).get(("decisions_total", "m", "lost"), 0)

    await until(lost, within_s=10, what="lost")
    assert not await planner.active()
    assert all(w.calls == [] for w in decodes)


async def test_without_etcd_nobody_acts(stage: Stage, tmp_path: Path) -> None:
    with Etcd(tmp_path, name="own") as own:
        async with open_discovery(stage.settings("x", etcd_endpoints=(own.endpoint,))) as discovery:
            election = Election(discovery, "x/1", LEASE_S, time.monotonic)
            assert await election.confirmed()
            own.kill()
            assert not await election.confirmed()

            async def active() -> bool:
                return election.active

            await until(active, lambda a: not a, within_s=LEASE_S, what="end of the belief")


async def test_nobody_gives_up_what_another_has(stage: Stage) -> None:
    async with open_discovery(stage.settings("claims")) as discovery:
        assert await discovery.claim("job", "a", 20.0)
        await discovery.resign("job", "b")
        assert not await discovery.claim("job", "b", 20.0)
        await discovery.resign("job", "a")
        assert await discovery.claim("job", "b", 20.0)
