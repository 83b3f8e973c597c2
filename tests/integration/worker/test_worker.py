"""A worker on real gRPC and real ZMQ, with an engine that needs no model."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.worker.v1 import worker_pb2 as pb
from forebay.worker.v1 import worker_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.blocks import block_keys
from services.common.cards import Instance
from services.common.errors import ForebayError
from services.common.events.codec import snapshot_from_proto
from services.common.events.model import (
    BlocksCleared,
    BlocksDigest,
    BlocksRemoved,
    BlocksStored,
    Event,
    LoadReport,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    Snapshot,
    Tier,
)
from services.common.events.subscriber import Apply, FollowStats, Reset, follow
from services.common.lifecycle import Lifecycle
from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate
from services.worker import app
from services.worker.config import WorkerSettings
from services.worker.errors import EngineStopped
from tests.fakes.discovery import FakeDiscovery
from tests.fakes.engine import FakeEngine, open_fake_engine
from tests.support.otlp import open_collector
from tests.support.polling import until

BLOCK = 32


@dataclass
class Rig:
    """A running worker and what a test needs to talk to it."""

    engine: FakeEngine
    life: Lifecycle
    discovery: FakeDiscovery
    stub: Any
    health: Any
    done: asyncio.Task[None]

    @property
    def instance(self) -> Instance:
        return self.discovery.registered_instances[-1]

    async def serving(self) -> bool:
        answer = await self.health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def metrics(self) -> dict[str, float]:
        def read() -> str:
            url = f"http://{self.instance.metrics_address}/metrics"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())

        lines = (await asyncio.to_thread(read)).splitlines()
        rows = (line.rsplit(" ", 1) for line in lines if line.startswith("forebay"))
        return {name: float(value) for name, value in rows}

    async def snapshot(self) -> Snapshot:
        return snapshot_from_proto(await self.stub.Snapshot(pb.SnapshotRequest(), timeout=5))


@asynccontextmanager
async def rig(
    *, engine_options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    more: dict[str, Any] = {"port": 0, "events_port": 0, "metrics_port": 0, "id": "w1", **settings}
    discovery = FakeDiscovery()
    life = Lifecycle()
    async with open_fake_engine(**(engine_options or {})) as engine:
        made = WorkerSettings(model=str(engine.profile.model_dir), served_model_name="tiny", **more)
        done = asyncio.create_task(app.main(made, life, engine=engine, registrar=discovery))
        try:

            async def registered() -> bool:
                assert not done.done() or done.result() is None
                return bool(discovery.registered_instances)

            await until(registered, within_s=20, what="registration")
            async with open_channel(discovery.registered_instances[-1].address) as channel:
                yield Rig(
                    engine,
                    life,
                    discovery,
                    worker_pb2_grpc.WorkerServiceStub(channel),
                    health_pb2_grpc.HealthStub(channel),
                    done,
                )
        finally:
            life.stop()
            engine.resume()
            await asyncio.wait({done}, timeout=20)
            assert done.done()
    if not done.cancelled() and isinstance(done.exception(), BaseException):
        # A test that kills the engine has looked at it.
        assert isinstance(done.exception(), EngineStopped), done.exception()


def request(name: str = "r", length: int = 40, salt: int = 0, **more: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=more.pop("max_tokens", 8), temperature=0)
    sampling.ignore_eos = True
    for key, value in more.pop("sampling", {}).items():
        setattr(sampling, key, value)
    return pb.GenerateRequest(
        request_id=name,
        attempt_id=more.pop("attempt_id", f"att-{name}"),
        model=more.pop("model", "tiny"),
        prompt_token_ids=[(i * 13 + salt) % 2000 + 3 for i in range(length)],
        sampling=sampling,
        **more,
    )


@dataclass
class Gateway:
    """A gateway's end of a session."""

    stream: Any
    deltas: dict[str, list[pb.RequestDelta]] = field(default_factory=dict)
    frames: list[pb.SessionResponse] = field(default_factory=list)

    async def send(self, **kind: Any) -> None:
        await self.stream.write(pb.SessionRequest(**kind))

    async def read(self) -> bool:
        frame = await asyncio.wait_for(self.stream.read(), 20)
        if frame is grpc.aio.EOF:
            return False
        self.frames.append(frame)
        for delta in frame.deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)
        return True

    async def until_end(self, *names: str) -> None:
        while not all(self.ended(name) for name in names):
            assert await self.read(), "the session ended"

    def ended(self, name: str) -> bool:
        return any(d.finish_reason for d in self.deltas.get(name, ()))

    def tokens(self, name: str) -> list[int]:
        return [t for d in self.deltas[name] for t in d.token_ids]

    def last(self, name: str) -> pb.RequestDelta:
        return self.deltas[name][-1]


@asynccontextmanager
async def session(
    worker: Rig, incarnation: int = 0, stub: worker_pb2_grpc.WorkerServiceStub | None = None
) -> AsyncIterator[Gateway]:
    stream = (stub or worker.stub).Session()
    gateway = Gateway(stream)
    await gateway.send(open=pb.SessionOpen(gateway_id="g", worker_incarnation=incarnation))
    try:
        yield gateway
    finally:
        stream.cancel()


async def generate(worker: Rig, asked: pb.GenerateRequest, **call: Any) -> list[pb.RequestDelta]:
    try:
        answers = worker.stub.Generate(asked, timeout=20, **call)
        return [answer.delta async for answer in answers]
    except grpc.aio.AioRpcError as exc:
        raise translate(exc) from exc


async def test_generate_streams_tokens_and_ends_once() -> None:
    async with rig() as worker:
        deltas = await generate(worker, request())
        assert len([t for d in deltas for t in d.token_ids]) == 8
        assert [d.finish_reason for d in deltas if d.finish_reason] == [pb.FINISH_REASON_LENGTH]
        assert deltas[0].cached_tokens == 0
        again = await generate(worker, request())
        assert again[0].cached_tokens == BLOCK
        assert [t for d in again for t in d.token_ids] == [t for d in deltas for t in d.token_ids]


@pytest.mark.parametrize(
    ("asked", "reason", "field"),
    [
        (request(max_tokens=0), "INVALID_REQUEST", "max_tokens"),
        (request(length=0), "INVALID_REQUEST", "prompt_token_ids"),
        (request(model="other"), "MODEL_NOT_FOUND", ""),
        (request(kv_lease=b"x"), "UNSUPPORTED", ""),
        (request(prefill_only=True), "NO_TRANSFER", ""),
        (
            request(prior_output_token_ids=[5], sampling={"presence_penalty": 1.0}),
            "RESUME_UNSUPPORTED",
            "",
        ),
    ],
)
async def test_a_refusal_is_a_status_and_a_delta(
    asked: pb.GenerateRequest, reason: str, field: str
) -> None:
    async with rig() as worker:
        with pytest.raises(ForebayError) as caught:
            await generate(worker, asked)
        assert caught.value.reason == reason
        assert caught.value.metadata.get("field", "") == field
        async with session(worker) as gateway:
            await gateway.send(generate=asked)
            await gateway.send(generate=request("good"))
            await gateway.until_end("r", "good")
            last = gateway.last("r")
            assert last.finish_reason == pb.FINISH_REASON_ERROR
            assert (last.error.reason, last.error.code) == (reason, caught.value.code.value[0])
            if field:
                assert last.error.field == field
            assert len(gateway.tokens("good")) == 8
        metrics = await worker.metrics()
        assert metrics[f'forebay_worker_refused_total{{reason="{reason}"}}'] == 2


async def test_a_handle_that_is_of_no_use_is_counted_and_the_prompt_computed() -> None:
    async with rig() as worker:
        handle = pb.TransferHandle(request_id="r", way="another")
        deltas = await generate(worker, request(transfer=handle))
        assert len([t for d in deltas for t in d.token_ids]) == 8
        metrics = await worker.metrics()
        assert metrics['forebay_worker_transfers_total{result="refused"}'] == 1


async def test_a_session_carries_many_requests_one_frame_a_step() -> None:
    async with (
        rig(engine_options={"step_s": 0.01}) as worker,
        session(worker, worker.instance.incarnation) as gateway,
    ):
        names = [f"r{i}" for i in range(10)]
        for i, name in enumerate(names):
            await gateway.send(generate=request(name, salt=i))
        await gateway.until_end(*names)
        assert {len(gateway.tokens(name)) for name in names} == {8}
        steps = [frame.step for frame in gateway.frames]
        assert steps == sorted(set(steps)), "two frames for one step"
        assert max(len(frame.deltas) for frame in gateway.frames) > 1
        alone = await generate(worker, request("r3", salt=3))
        assert [t for d in alone for t in d.token_ids] == gateway.tokens("r3")


async def test_half_closed_sessions_end_with_their_last_request() -> None:
    async with rig() as worker, session(worker) as gateway:
        await gateway.send(generate=request("a", max_tokens=30))
        await gateway.stream.done_writing()
        while await gateway.read():
            pass
        assert len(gateway.tokens("a")) == 30
        assert await gateway.stream.code() is grpc.StatusCode.OK


async def test_another_life_is_refused() -> None:
    async with rig() as worker, session(worker, worker.instance.incarnation + 1) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.read()
        error = translate(caught.value)
        assert (error.reason, error.code) == (
            "WRONG_INCARNATION",
            grpc.StatusCode.FAILED_PRECONDITION,
        )


@pytest.mark.parametrize(
    "messages",
    [
        [pb.SessionRequest(generate=request())],
        [pb.SessionRequest(open=pb.SessionOpen())] * 2,
        [pb.SessionRequest(open=pb.SessionOpen()), pb.SessionRequest()],
        [
            pb.SessionRequest(open=pb.SessionOpen()),
            pb.SessionRequest(generate=request(name="")),
        ],
        [
            pb.SessionRequest(open=pb.SessionOpen()),
            *[pb.SessionRequest(generate=request(max_tokens=5000))] * 2,
        ],
    ],
)
async def test_a_broken_protocol_ends_the_session(messages: list[pb.SessionRequest]) -> None:
    async with rig() as worker:
        stream = worker.stub.Session()
        for message in messages:
            await stream.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await asyncio.wait_for(stream.read(), 10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await idle(worker, sessions=0)


async def test_abort_is_answered_and_frees_the_engine() -> None:
    async with rig(engine_options={"step_s": 0.005}) as worker, session(worker) as gateway:
        await gateway.send(generate=request("a", max_tokens=5000))
        while "a" not in gateway.deltas:
            await gateway.read()
        await gateway.send(abort=pb.AbortRequest(request_id="a"))
        await gateway.send(abort=pb.AbortRequest(request_id="never"))
        await gateway.until_end("a")
        assert gateway.last("a").finish_reason == pb.FINISH_REASON_ABORT
        assert not gateway.last("a").HasField("error")
        # The name is free again.
        await gateway.send(generate=request("a"))
        before = len(gateway.deltas["a"])
        while not any(d.finish_reason for d in gateway.deltas["a"][before:]):
            await gateway.read()
        await idle(worker)


async def idle(worker: Rig, sessions: int | None = None) -> None:
    names = (
        'forebay_worker_running_requests{dp_rank="0"}',
        'forebay_worker_waiting_requests{dp_rank="0"}',
        'forebay_worker_pending_prefill_tokens{dp_rank="0"}',
        'forebay_worker_kv_usage_ratio{dp_rank="0"}',
        "forebay_worker_requests",
    )

    async def busy() -> dict[str, float]:
        found = await worker.metrics()
        seen = {name: found[name] for name in names}
        if sessions is not None:
            seen["sessions"] = found["forebay_worker_sessions"] - sessions
        return {name: value for name, value in seen.items() if value != 0.0}

    await until(busy, lambda left: not left, within_s=3, what="idle worker")


@pytest.mark.parametrize("call", ["session", "generate"])
async def test_a_caller_that_leaves_takes_its_requests_along(call: str) -> None:
    async with rig(engine_options={"step_s": 0.005}) as worker:
        asked = [request(f"r{i}", salt=i, max_tokens=5000) for i in range(40)]

        async def admitted() -> float:
            return (await worker.metrics())["forebay_worker_admitted_total"]

        if call == "session":
            async with session(worker) as gateway:
                for one in asked:
                    await gateway.send(generate=one)
                await until(admitted, lambda n: n == 40, within_s=10)
        else:
            calls = [worker.stub.Generate(one) for one in asked]
            await until(admitted, lambda n: n == 40, within_s=10)
            for one in calls:
                one.cancel()
        await idle(worker, sessions=0)
        metrics = await worker.metrics()
        assert metrics['forebay_worker_finished_total{reason="abort"}'] == 40


async def test_a_deadline_ends_a_request_and_says_so() -> None:
    async with rig(engine_options={"step_s": 0.01}) as worker, session(worker) as gateway:
        await gateway.send(generate=request("a", max_tokens=5000, deadline_ms=100))
        await gateway.until_end("a")
        last = gateway.last("a")
        assert (last.finish_reason, last.error.reason) == (pb.FINISH_REASON_ABORT, "DEADLINE")
        with pytest.raises(ForebayError) as caught:
            await generate(worker, request("b", max_tokens=5000, deadline_ms=100))
        assert (caught.value.code, caught.value.reason) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "DEADLINE",
        )
        await idle(worker)


async def test_too_many_requests_are_refused() -> None:
    async with (
        rig(engine_options={"step_s": 0.02}, max_requests=2) as worker,
        session(worker) as gateway,
    ):
        for name in ("a", "b", "c"):
            await gateway.send(generate=request(name, max_tokens=20))
        await gateway.until_end("a", "b", "c")
        assert gateway.last("c").error.reason == "OVERLOADED"
        assert gateway.last("a").finish_reason == pb.FINISH_REASON_LENGTH


async def test_who_reads_slowly_loses_its_request_and_others_go_on() -> None:
    # Wide log probabilities fill the stream's window quickly, as it doesn't grow with the speed.
    narrow = (("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))
    async with (
        rig(backlog_tokens=3000) as worker,
        grpc.aio.insecure_channel(worker.instance.address, options=narrow) as channel,
        session(worker, stub=worker_pb2_grpc.WorkerServiceStub(channel)) as slow,
        session(worker) as quick,
    ):
        await slow.send(generate=request("a", max_tokens=5000, sampling={"logprobs": 20}))
        await slow.read()
        await quick.send(generate=request("b", max_tokens=300))
        await quick.until_end("b")
        assert len(quick.tokens("b")) == 300

        async def left() -> float:
            return (await worker.metrics())["forebay_worker_requests"]

        await until(left, lambda n: n == 0, within_s=20, what="cut of the slow request")
        assert (await worker.metrics())['forebay_worker_finished_total{reason="abort"}'] == 1
        await slow.until_end("a")
        assert slow.last("a").error.reason == "OVERLOADED"
        assert 0 < len(slow.tokens("a")) < 5000
        await slow.send(generate=request("c"))
        await slow.until_end("c")
        assert len(slow.tokens("c")) == 8


class Follower:
    """A router's view of the worker, kept from its stream."""

    def __init__(self) -> None:
        self.stats = FollowStats()
        self.keys: set[int] = set()
        self.running: dict[str, RequestAdmitted] = {}
        self.decoding: set[str] = set()
        self.events: list[Event] = []
        self.load: LoadReport | None = None
        self.sequence = -1
        self.resets = 0

    async def run(self, worker: Rig) -> None:
        stream = follow(worker.instance.events_address, "w1", worker.snapshot, stats=self.stats)
        async for item in stream:
            if isinstance(item, Reset):
                self.resets += 1
                self.sequence = item.snapshot.sequence
                self.keys = {k for tier in item.snapshot.blocks for k in tier.keys}
                self.running = {r.admitted.attempt_id: r.admitted for r in item.snapshot.requests}
                self.decoding = {
                    r.admitted.attempt_id for r in item.snapshot.requests if r.decoding
                }
                self.load = item.snapshot.load
            elif isinstance(item, Apply):
                self.sequence = item.batch.sequence
                for event in item.batch.events:
                    self.take(event)

    def take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, BlocksStored):
            assert self.keys.isdisjoint(event.keys)
            self.keys.update(event.keys)
        elif isinstance(event, BlocksRemoved):
            assert self.keys.issuperset(event.keys)
            self.keys.difference_update(event.keys)
        elif isinstance(event, BlocksCleared):
            self.keys.clear()
        elif isinstance(event, BlocksDigest):
            assert event == BlocksDigest(Tier.G1, len(self.keys), reduce(xor, self.keys, 0))
        elif isinstance(event, RequestAdmitted):
            assert event.attempt_id not in self.running
            self.running[event.attempt_id] = event
        elif isinstance(event, RequestFirstToken):
            assert event.attempt_id not in self.decoding
            self.decoding.add(event.attempt_id)
        elif isinstance(event, RequestFinished):
            del self.running[event.attempt_id]
            self.decoding.discard(event.attempt_id)
        elif isinstance(event, LoadReport):
            self.load = event


async def test_routers_learn_all_of_it_and_late_ones_too() -> None:
    options = {"step_s": 0.002, "total_blocks": 40}
    async with (
        rig(engine_options=options, digest_interval_s=0.02) as worker,
        session(worker) as gateway,
    ):
        early = Follower()
        tasks = [asyncio.create_task(early.run(worker))]

        async def joined() -> int:
            return early.resets

        await until(joined, within_s=5)
        names = [f"r{i}" for i in range(30)]
        late: list[Follower] = []
        for i, name in enumerate(names):
            await gateway.send(generate=request(name, 150, salt=i, max_tokens=20))
            if i % 10 == 9:
                await gateway.until_end(names[i // 2])
                # One that comes in the middle of it all must see the same in the end.
                late.append(Follower())
                tasks.append(asyncio.create_task(late[-1].run(worker)))
                await gateway.send(abort=pb.AbortRequest(request_id=name))
        await gateway.until_end(*names)

        async def behind() -> list[Any]:
            truth = await worker.snapshot()
            return [
                f
                for f in (early, *late)
                if f.sequence != truth.sequence or f.running or f.keys != worker.engine.held
            ]

        try:
            await until(behind, lambda rest: not rest, within_s=5, what="agreement")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert early.stats.gaps == 0
        assert {f.resets for f in (early, *late)} == {1}
        assert any(isinstance(e, BlocksDigest) and e.blocks for e in early.events)
        finished = [e for e in early.events if isinstance(e, RequestFinished)]
        assert sorted(e.attempt_id for e in finished) == sorted(f"att-{n}" for n in names)
        for event in finished:
            deltas = gateway.deltas[event.attempt_id.removeprefix("att-")]
            assert event.output_tokens == sum(len(d.token_ids) for d in deltas)
            assert event.aborted == (deltas[-1].finish_reason == pb.FINISH_REASON_ABORT)
        admitted = next(e for e in early.events if isinstance(e, RequestAdmitted))
        assert (admitted.attempt_id, admitted.prompt_tokens) == ("att-r0", 150)
        prompt = list(request("r0", 150).prompt_token_ids)
        assert list(admitted.keys) == block_keys(prompt, BLOCK)
        assert early.load is not None
        assert (early.load.running_requests, early.load.used_blocks) == (0, 0)


async def test_counts_in_events_are_those_of_the_deltas() -> None:
    async with rig() as worker:
        await generate(worker, request("a", 100))
        seen = Follower()
        task = asyncio.create_task(seen.run(worker))

        async def count() -> int:
            return seen.resets

        await until(count, within_s=5)
        deltas = await generate(worker, request("b", 100))
        assert deltas[0].cached_tokens == 96

        async def ended() -> list[Event]:
            return [e for e in seen.events if isinstance(e, RequestFinished)]

        await until(ended, within_s=5)
        task.cancel()
        first = next(e for e in seen.events if isinstance(e, RequestFirstToken))
        last = next(e for e in seen.events if isinstance(e, RequestFinished))
        assert first.cached_tokens == last.cached_tokens == 96
        assert (last.output_tokens, last.aborted) == (8, False)


async def test_a_snapshot_holds_what_runs() -> None:
    async with rig(engine_options={"step_s": 0.01}) as worker, session(worker) as gateway:
        await gateway.send(generate=request("a", 70, max_tokens=500))
        while "a" not in gateway.deltas:
            await gateway.read()
        snapshot = await worker.snapshot()
        assert snapshot.incarnation == worker.instance.incarnation
        (running,) = snapshot.requests
        assert (running.admitted.attempt_id, running.decoding) == ("att-a", True)
        assert running.admitted.max_new_tokens == 500
        assert snapshot.load is not None
        assert snapshot.load.total_blocks == worker.engine.profile.total_blocks


async def test_stop_drains_refuses_and_deregisters() -> None:
    async with rig(engine_options={"step_s": 0.01}) as worker, session(worker) as gateway:
        await gateway.send(generate=request("a", max_tokens=60))
        while "a" not in gateway.deltas:
            await gateway.read()
        worker.life.stop()

        async def told() -> bool:
            return worker.instance.draining and not await worker.serving()

        await until(told, within_s=3, what="draining record and health")
        await gateway.send(generate=request("b"))
        await gateway.until_end("b")
        assert gateway.last("b").error.reason == "DRAINING"
        async with session(worker) as second:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await second.read()
            assert translate(caught.value).reason == "DRAINING"
        await gateway.until_end("a")
        assert len(gateway.tokens("a")) == 60
        await asyncio.wait_for(asyncio.shield(worker.done), 10)


async def test_a_drain_that_takes_too_long_aborts() -> None:
    options = {"step_s": 0.01}
    async with (
        rig(engine_options=options, drain_timeout_s=0.1) as worker,
        session(worker) as gateway,
    ):
        await gateway.send(generate=request("a", max_tokens=5000))
        while "a" not in gateway.deltas:
            await gateway.read()
        worker.life.stop()
        await gateway.until_end("a")
        assert gateway.last("a").finish_reason == pb.FINISH_REASON_ABORT
        await asyncio.wait_for(asyncio.shield(worker.done), 10)


async def test_drain_by_rpc_keeps_the_worker_up() -> None:
    async with rig(engine_options={"step_s": 0.01}) as worker, session(worker) as gateway:
        await gateway.send(generate=request("a", max_tokens=5000))
        while "a" not in gateway.deltas:
            await gateway.read()
        answer = await worker.stub.Drain(pb.DrainRequest(timeout_ms=50), timeout=10)
        assert answer.remaining_requests == 1
        assert not await worker.serving()
        assert worker.instance.draining
        answer = await worker.stub.Drain(pb.DrainRequest(timeout_ms=50, abort_rest=True))
        await gateway.until_end("a")
        answer = await worker.stub.Drain(pb.DrainRequest())
        assert answer.remaining_requests == 0
        with pytest.raises(ForebayError) as caught:
            await generate(worker, request("b"))
        assert caught.value.reason == "DRAINING"
        assert not worker.done.done()


async def test_a_stuck_engine_is_told_and_so_is_its_recovery() -> None:
    async with rig(watchdog_s=0.2) as worker, session(worker) as gateway:
        assert await worker.serving()
        worker.engine.pause()
        await gateway.send(generate=request("a"))

        async def stuck() -> bool:
            return worker.instance.draining and not await worker.serving()

        await until(stuck, within_s=5, what="NOT_SERVING")
        assert (await worker.metrics())["forebay_worker_engine_stuck"] == 1
        worker.engine.resume()
        await gateway.until_end("a")

        async def well() -> bool:
            return not worker.instance.draining and await worker.serving()

        await until(well, within_s=5, what="SERVING")


async def test_an_idle_engine_is_not_stuck() -> None:
    async with rig(watchdog_s=0.1) as worker:
        for _ in range(3):
            await generate(worker, request())
            stuck = (await worker.metrics())["forebay_worker_engine_stuck"]
            assert (stuck, await worker.serving()) == (0, True)


async def test_a_dead_engine_ends_its_requests_and_the_process() -> None:
    async with rig(engine_options={"step_s": 0.01}) as worker:
        async with session(worker) as gateway:
            for name in ("a", "b"):
                await gateway.send(generate=request(name, max_tokens=5000))
            while len(gateway.deltas) < 2:
                await gateway.read()
            worker.engine.die()
            await gateway.until_end("a", "b")
            for name in ("a", "b"):
                error = gateway.last(name).error
                assert (error.reason, error.code) == ("ENGINE_DEAD", 14)
            with pytest.raises(ForebayError) as caught:
                await generate(worker, request("c"))
            assert caught.value.reason == "ENGINE_DEAD"
        await asyncio.wait({worker.done}, timeout=10)
        assert isinstance(worker.done.exception(), EngineStopped)


async def test_card_and_files() -> None:
    async with rig(labels={"zone": "a"}) as worker:
        answer = await worker.stub.GetModelCard(pb.GetModelCardRequest(), timeout=5)
        card = worker.instance.card
        assert card is not None
        assert answer.card == card.to_proto()
        assert (answer.worker.id, answer.worker.incarnation) == ("w1", worker.instance.incarnation)
        assert worker.instance.labels == {"zone": "a"}
        assert card.model == "tiny"
        assert len(card.namespace) == 32
        for file in card.files:
            chunks = worker.stub.GetModelFile(pb.GetModelFileRequest(name=file.name), timeout=5)
            content = b"".join([c.chunk async for c in chunks])
            path: Path = worker.engine.profile.model_dir / file.name
            assert content == await asyncio.to_thread(path.read_bytes)
        for name in ("model.safetensors", "../secret", "/etc/passwd", ""):
            chunks = worker.stub.GetModelFile(pb.GetModelFileRequest(name=name), timeout=5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await chunks.read()
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reset_cache() -> None:
    async with rig(engine_options={"step_s": 0.01}) as worker, session(worker) as gateway:
        await generate(worker, request("x", 100, max_tokens=1))
        answer = await worker.stub.ResetCache(pb.ResetCacheRequest(), timeout=5)
        assert answer.blocks == 3
        assert not (await worker.snapshot()).blocks
        await gateway.send(generate=request("a", max_tokens=5000))
        while "a" not in gateway.deltas:
            await gateway.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.stub.ResetCache(pb.ResetCacheRequest(), timeout=5)
        assert translate(caught.value).reason == "CACHE_IN_USE"


async def test_the_warm_up_leaves_no_trace() -> None:
    async with rig() as worker:
        snapshot = await worker.snapshot()
        assert (snapshot.sequence, snapshot.blocks, snapshot.requests) == (0, (), ())
        assert (await worker.metrics())["forebay_worker_admitted_total"] == 0


async def test_a_stop_during_the_warm_up_is_obeyed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    discovery, life = FakeDiscovery(), Lifecycle()
    warming = asyncio.Event()
    async with open_fake_engine() as engine:
        # It takes the warm-up's request and never answers.
        monkeypatch.setattr(engine, "submit", lambda request: warming.set())
        settings = WorkerSettings(
            model=str(engine.profile.model_dir), port=0, events_port=0, metrics_port=0
        )
        done = asyncio.create_task(app.main(settings, life, engine=engine, registrar=discovery))
        async with asyncio.timeout(20):
            await warming.wait()
        life.stop()
        async with asyncio.timeout(5):
            await done
    assert not discovery.registered_instances


async def test_a_trace_goes_through() -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    parent = "b7ad6b7169203331"
    with open_collector() as collector:
        async with rig(otlp_endpoint=collector.endpoint) as worker:
            context = f"00-{trace}-{parent}-01"
            await generate(worker, request("a", traceparent=context))
            await generate(worker, request("b"), metadata=(("traceparent", context),))

            async def spans() -> list[Any]:
                return collector.trace(trace)

            found = await until(spans, lambda s: len(s) == 2, within_s=10, what="spans")
        assert {(s.name, s.parent_id, s.service) for s in found} == {
            ("worker.generate", parent, "forebay-worker")
        }
