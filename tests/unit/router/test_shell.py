"""What lies between the core and the wire: records, metrics, spans, settings."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from forebay.common.v1 import common_pb2
from forebay.router.v1 import router_pb2 as pb
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from services.common.cards import Adapter, Instance, InstanceKind, ModelCard, Role
from services.common.discovery import DiscoveryEvent, Synced, Up
from services.common.errors import Unavailable
from services.common.events.model import (
    LoadReport,
    RequestAdmitted,
    RunningRequest,
    Snapshot,
    Tier,
    TierBlocks,
)
from services.common.events.subscriber import FollowStats
from services.common.ids import AttemptId, BlockKey, new_id
from services.common.settings import SettingsError
from services.router.adapters.discovery import watch_workers, worker_info
from services.router.adapters.inbox import Inbox
from services.router.adapters.metrics import RouterMetrics
from services.router.config import RouterSettings
from services.router.core.admission import AdmissionConfig
from services.router.core.answers import Outcome, Prefetch, Transfer, TransferResult
from services.router.core.nodes import NodeInfo
from services.router.core.placement import CoreConfig, RouterCore
from services.router.core.workers import HolderId, WorkerInfo, WorkerRole
from services.router.server import RouterServicer

CARD = ModelCard("m", b"\0" * 32, 32, 4096, 100, adapters=(Adapter("a", "/a"),), total_blocks=9)
RECORD = Instance(
    "w0", InstanceKind.WORKER, 5, "h:1", card=CARD, role=Role.DECODE, kvbm="n0", transfer="nixl"
)


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
        transfer="nixl",
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


def test_transfers_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    holder = HolderId("d", 1)
    metrics.placed(None)
    metrics.placed(4000)
    metrics.report(Transfer(TransferResult.CAME, "p", holder, 3900, 99, 0.2, 0.1))
    metrics.report(Transfer(TransferResult.CAME, "p", holder, 100, 1, 0.1))
    metrics.report(Transfer(TransferResult.FAILED, "p", holder, seconds=5.0))
    metrics.report(Transfer(TransferResult.MISSED, "p", holder))
    metrics.report(Outcome(holder, AttemptId("a"), 1000, 0, 10))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"forebay_router_{name}", labels)

    assert value("placements_total", path="whole") == value("placements_total", path="apart") == 1
    assert value("planned_transfer_tokens_total") == 4000
    assert [value("transfers_total", result=r) for r in ("came", "failed", "missed")] == [2, 1, 1]
    assert (value("transfer_tokens_total"), value("transfer_bytes_total")) == (4000, 100)
    assert (value("transfer_seconds_count"), value("transfer_seconds_sum")) == (
        2,
        pytest.approx(0.3),
    )
    assert value("predicted_transfer_seconds_total") == 0.1
    assert value("actual_transfer_seconds_total") == 0.2
    assert value("actual_cached_tokens_total") == 10


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


class Apart(Rig):
    """A worker that decodes a lot, and one that prefills for it."""

    def __init__(self) -> None:
        super().__init__()
        self.core = RouterCore(CoreConfig(), random.Random(1))
        self.registry = CollectorRegistry()
        self.hints: list[Prefetch] = []
        info = WorkerInfo("d", 2, "d:1", "m", 16, namespace=CARD.namespace, transfer="nixl")
        info = replace(info, role=WorkerRole.DECODE, kvbm="nd")
        self.core.record(info, 0.0)
        prefill = replace(info, id="p", address="p:1", role=WorkerRole.PREFILL, kvbm="np")
        self.core.record(prefill, 0.0)
        running = tuple(
            RunningRequest(RequestAdmitted(AttemptId(f"x{i}"), 10, 99), True) for i in range(8)
        )
        self.core.reset(Snapshot("d", 2, 0, (), running), 0.0)
        held = LoadReport(held_transfers=3)
        self.core.reset(Snapshot("p", 2, 0, (), (), held), 0.0)
        self.core.nodes.record(NodeInfo("np", 1, "np:1"), 0.0)
        below = (TierBlocks(Tier.G3, (BlockKey(1), BlockKey(2)), namespace=CARD.namespace),)
        self.core.nodes.reset(Snapshot("np", 1, 0, below), 0.0)
        self.servicer = RouterServicer(
            self.core,
            lambda: 0.5,
            RouterMetrics(self.registry),
            TracerProvider().get_tracer("t"),
            router_id="r",
            policy="kv",
            new_attempt=lambda: AttemptId(new_id("att")),
            streams=FollowStats(),
            hint=self.hints.append,
            admission=AdmissionConfig(),
        )


REST = SimpleNamespace(invocation_metadata=tuple, time_remaining=lambda: None)
LONG = pb.RouteRequest(model="m", block_size_tokens=16, prompt_tokens=4000, block_hashes=[1, 2, 3])


async def test_both_legs_are_told_and_each_is_taken_back_by_its_id() -> None:
    rig = Apart()
    answer = await rig.servicer.Route(LONG, REST)
    assert (answer.worker.id, answer.address) == ("d", "d:1")
    assert (answer.prefill_worker.id, answer.prefill_worker.incarnation) == ("p", 2)
    assert answer.prefill_address == "p:1"
    assert answer.prefill_attempt_id not in ("", answer.attempt_id)
    assert answer.predicted_cached_tokens == 0
    assert answer.predicted_prefill_cached_tokens == 32, "from its tiers"
    assert rig.core.bookings == 2

    async def messages() -> Any:
        for attempt_id in (answer.prefill_attempt_id, answer.attempt_id):
            release = pb.ReleasePlacement(attempt_id=attempt_id)
            yield pb.RouteStreamRequest(correlation_id=1, release=release)
            yield pb.RouteStreamRequest(correlation_id=2, route=REQUEST)

    bookings = []
    async for answer in rig.servicer.RouteStream(messages(), None):
        rig.core.release(AttemptId(answer.placement.attempt_id))
        bookings.append(rig.core.bookings)
        assert not answer.placement.HasField("prefill_worker")
    assert bookings[-1] == 0
    sample = rig.registry.get_sample_value
    assert sample("forebay_router_placements_total", {"path": "apart"}) == 1
    assert sample("forebay_router_placements_total", {"path": "whole"}) == 2


async def test_a_prefill_worker_that_refuses_is_left_out() -> None:
    rig = Apart()
    answer = await rig.servicer.Route(LONG, REST)

    async def messages() -> Any:
        release = pb.ReleasePlacement(
            attempt_id=answer.prefill_attempt_id,
            worker_unreachable=True,
            worker=answer.prefill_worker,
        )
        yield pb.RouteStreamRequest(correlation_id=1, release=release)
        yield pb.RouteStreamRequest(correlation_id=2, route=LONG)

    (again,) = await rig.stream(messages())
    assert again.placement.worker.id == "d" and not again.placement.HasField("prefill_worker")


async def test_whole_is_whole() -> None:
    rig, whole = Apart(), pb.RouteRequest()
    whole.CopyFrom(LONG)
    whole.whole = True
    answer = await rig.servicer.Route(whole, REST)
    assert answer.worker.id == "d" and not answer.HasField("prefill_worker")
    assert not answer.prefill_attempt_id and not answer.prefill_address


async def test_the_prefill_workers_daemon_gets_the_hint() -> None:
    rig = Apart()
    await rig.servicer.Route(LONG, REST)
    assert [(h.node, list(h.keys)) for h in rig.hints] == [("np", [1, 2])]


async def test_explain_shows_both_ways() -> None:
    rig = Apart()
    card = await rig.servicer.Explain(pb.ExplainRequest(request=LONG), REST)
    assert (card.whole.worker.id, card.apart.worker.id) == ("d", "d")
    assert not card.whole.HasField("prefill_worker") and card.apart.prefill_worker.id == "p"
    assert card.apart.chosen and not card.whole.chosen and card.whole.reason
    assert card.whole.stall_s > 5 and card.apart.transfer_s > 0
    for way in (card.whole, card.apart):
        parts = way.queue_s + way.prefill_s + way.transfer_s + way.decode_queue_s + way.stall_s
        assert way.score_s == pytest.approx(parts)
    roles = {c.worker.id: c.role for c in card.candidates}
    assert roles == {"d": common_pb2.ROLE_DECODE, "p": common_pb2.ROLE_PREFILL}
    rig.core.record_vanished("p", 2)
    rig.core.refused("p", 2, 0.5)
    card = await rig.servicer.Explain(pb.ExplainRequest(request=LONG), REST)
    assert card.apart.reason == "no prefill worker takes requests"
    assert not card.apart.HasField("worker") and card.whole.chosen
    one = Rig()
    card = await one.servicer.Explain(pb.ExplainRequest(request=REQUEST), REST)
    assert card.HasField("whole") and not card.HasField("apart")


async def test_workers_show_how_kv_can_be_taken() -> None:
    rig = Apart()
    answer = await rig.servicer.ListWorkers(pb.ListWorkersRequest(), REST)
    shown = {w.worker.id: (w.transfer, w.held_transfers, w.role) for w in answer.workers}
    assert shown == {
        "d": ("nixl", 0, common_pb2.ROLE_DECODE),
        "p": ("nixl", 3, common_pb2.ROLE_PREFILL),
    }


async def test_a_gateway_that_is_gone_leaves_no_leg_behind() -> None:
    """Its placement came late, and nobody took it."""
    rig = Apart()
    inbox = Inbox()
    answer = await rig.servicer.Route(LONG, REST)
    inbox.answer(pb.RouteStreamResponse(correlation_id=1, placement=answer))
    assert inbox.unsent() == [answer.attempt_id, answer.prefill_attempt_id]
