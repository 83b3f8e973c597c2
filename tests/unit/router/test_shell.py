"""What lies between the core and the wire: records, metrics, spans, settings."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from forebay.router.v1 import router_pb2 as pb
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from services.common.cards import Adapter, Instance, InstanceKind, ModelCard, Role
from services.common.discovery import DiscoveryEvent, Synced, Up
from services.common.errors import Unavailable
from services.common.events.subscriber import FollowStats
from services.common.ids import AttemptId, new_id
from services.common.settings import SettingsError
from services.router.adapters.discovery import watch_workers, worker_info
from services.router.adapters.metrics import RouterMetrics
from services.router.config import RouterSettings
from services.router.core.answers import Outcome
from services.router.core.placement import CoreConfig, RouterCore
from services.router.core.workers import HolderId, WorkerInfo, WorkerRole
from services.router.server import RouterServicer

CARD = ModelCard("m", b"\0" * 32, 32, 4096, 100, adapters=(Adapter("a", "/a"),), total_blocks=9)
RECORD = Instance("w0", InstanceKind.WORKER, 5, "h:1", card=CARD, role=Role.DECODE, kvbm="n0")


def test_a_record_in_the_cores_words() -> None:
    assert worker_info(RECORD) == WorkerInfo(
        "w0",
        5,
        "h:1",
        "m",
        32,
        9,
        4096,
        100,
        {"a": "/a"},
        {},
        WorkerRole.DECODE,
        kvbm="n0",
        namespace=b"\0" * 32,
    )


@pytest.mark.parametrize(
    "record",
    [
        replace(RECORD, card=None),
        replace(RECORD, card=replace(CARD, block_size=0)),
        replace(RECORD, incarnation=0),
        replace(RECORD, dp_size=1 << 31),
    ],
)
def test_records_that_nobody_can_route_to(record: Instance) -> None:
    with pytest.raises(ValueError, match="it"):
        worker_info(record)


def test_the_alarm_goes_off_when_predictions_are_wrong_and_ends_when_they_are_right() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)

    def finish(predicted: int, actual: int, times: int) -> float | None:
        for _ in range(times):
            metrics.outcome(Outcome(HolderId("w", 1), AttemptId("a"), 1000, predicted, actual))
        return registry.get_sample_value("forebay_router_prediction_alarm")

    assert finish(960, 0, 19) == 0, "too few to say"
    assert finish(960, 0, 1) == 1
    assert finish(960, 960, 195) == 0
    assert registry.get_sample_value("forebay_router_predicted_cached_tokens_total") == 960 * 215
    assert registry.get_sample_value("forebay_router_actual_cached_tokens_total") == 960 * 195


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(SettingsError, match="policy"):
        RouterSettings.load(["--policy", "best"])
    assert RouterSettings.load(["--policy", "round-robin"]).policy == "round-robin"
    assert RouterSettings().core_config() == CoreConfig(), "defaults are told in one place"


class Rig:
    """A servicer over a core with one worker."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.core = RouterCore(CoreConfig(), random.Random(1))
        self.core.record(WorkerInfo("w0", 1, "x:1", "m", 16), 0.0)
        self.servicer = RouterServicer(
            self.core,
            lambda: 0.5,
            RouterMetrics(CollectorRegistry()),
            provider.get_tracer("t"),
            router_id="r",
            policy="kv",
            new_attempt=lambda: AttemptId(new_id("att")),
            streams=FollowStats(),
        )

    async def stream(self, messages: Any) -> list[pb.RouteStreamResponse]:
        return [a async for a in self.servicer.RouteStream(messages, None)]


REQUEST = pb.RouteRequest(model="m", block_size_tokens=16, prompt_tokens=5)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_spans_continue_the_clients_trace() -> None:
    rig = Rig()
    context = SimpleNamespace(
        invocation_metadata=lambda: (("traceparent", TRACE),), time_remaining=lambda: None
    )
    await rig.servicer.Route(REQUEST, context)
    traced = pb.RouteRequest()
    traced.CopyFrom(REQUEST)
    traced.traceparent = TRACE

    async def messages() -> Any:
        yield pb.RouteStreamRequest(correlation_id=1, route=traced)
        yield pb.RouteStreamRequest(correlation_id=2, route=REQUEST)

    assert len(await rig.stream(messages())) == 2
    ids = {format(s.context.trace_id, "032x") for s in rig.spans.get_finished_spans()}
    assert ids == {"0af7651916cd43dd8448eb211c80319c"}
    assert len(rig.spans.get_finished_spans()) == 2


async def test_one_failing_decision_does_not_end_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cases, row 71: an unexpected exception is answered; nobody hangs."""
    rig = Rig()
    place, calls = rig.core.place, []

    def sometimes(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("boom")
        return place(*args)

    monkeypatch.setattr(rig.core, "place", sometimes)

    async def messages() -> Any:
        for i in range(3):
            yield pb.RouteStreamRequest(correlation_id=i, route=REQUEST)

    answers = {a.correlation_id: a for a in await rig.stream(messages())}
    assert answers[0].HasField("placement") and answers[2].HasField("placement")
    assert answers[1].failure.reason == "INTERNAL" and "boom" not in answers[1].failure.message


async def test_a_gateway_that_asks_faster_than_it_reads_is_bounded() -> None:
    rig = Rig()
    asked = 0

    async def messages() -> Any:
        nonlocal asked
        while True:
            asked += 1
            yield pb.RouteStreamRequest(correlation_id=asked, route=REQUEST)

    answers = rig.servicer.RouteStream(messages(), None)
    assert (await anext(answers)).correlation_id == 1
    for _ in range(5000):
        await asyncio.sleep(0)
    assert asked < 2100
    await answers.aclose()


async def test_a_burst_of_questions_lets_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heartbeats of workers are read by the same loop: a second of decisions would be silence."""
    rig = Rig()
    place, turns, decided = rig.core.place, 0, list[int]()

    def counted(*args: Any) -> Any:
        decided.append(turns)
        return place(*args)

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    monkeypatch.setattr(rig.core, "place", counted)

    async def messages() -> Any:
        for i in range(500):
            yield pb.RouteStreamRequest(correlation_id=i, route=REQUEST)

    ticking = asyncio.create_task(others())
    answers = await rig.stream(messages())
    ticking.cancel()
    assert [a.correlation_id for a in answers] == list(range(500))
    assert max(Counter(decided).values()) <= 32


async def test_a_late_record_of_a_former_life_moves_nobody() -> None:
    """A worker that was stopped while another took its id writes its record once more."""
    core = RouterCore(CoreConfig(), random.Random(1))
    followed = []

    class Records:
        async def watch(self, kind: InstanceKind | None = None) -> AsyncIterator[DiscoveryEvent]:
            yield Up(replace(RECORD, address="old:1", events_address="old:2"))
            yield Up(replace(RECORD, incarnation=6, address="new:1", events_address="new:2"))
            yield Up(replace(RECORD, address="old:1", events_address="old:2"))
            yield Synced()

    followers: Any = SimpleNamespace(follow=lambda *where: followed.append(where))
    await watch_workers(Records(), core, followers, lambda: 0.0, asyncio.Event())
    assert followed == [("worker", "w0", "old:1", "old:2"), ("worker", "w0", "new:1", "new:2")]
    (view,) = core.workers(0.0)
    assert (view.holder.incarnation, view.info.address) == (6, "new:1")


async def test_a_drain_answers_what_was_asked_and_ends() -> None:
    rig = Rig()
    never = asyncio.Event()

    async def messages() -> Any:
        yield pb.RouteStreamRequest(correlation_id=1, route=REQUEST)
        await never.wait()

    answers = rig.servicer.RouteStream(messages(), None)
    assert (await anext(answers)).correlation_id == 1
    rig.servicer.drain()
    with pytest.raises(Unavailable) as caught:
        await anext(answers)
    assert caught.value.reason == "DRAINING"
    with pytest.raises(Unavailable):
        await rig.stream(messages())
