"""A router by its contract: real gRPC, real event streams, real etcd."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.router.v1 import router_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.blocks import block_keys
from services.common.errors import InvalidRequest, NotFound, Unavailable
from services.common.events.model import LoadReport
from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate
from tests.fakes.worker import fake_worker
from tests.integration.router.conftest import Cluster, Router, until
from tests.support.etcd import Etcd, free_port

KEYS = [0xF000_0000_0000_0000 + i for i in range(20)]


async def both_ready(router: Router, *ids: str) -> None:
    await until("states", router.states, dict.fromkeys(ids, "READY"))


async def failure(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return translate(caught.value)


async def test_follows_workers_and_places_by_cache(cluster: Cluster) -> None:
    w0, w1 = await cluster.worker("w0"), await cluster.worker("w1")
    w0.store(KEYS)
    router = await cluster.router()
    await both_ready(router, "w0", "w1")
    w1.store(KEYS[:3])
    await until("digests", router.digests, {"w0": w0.digest(), "w1": w1.digest()})

    answer = await router.route(KEYS)
    assert (answer.worker.id, answer.address) == ("w0", w0.address)
    assert answer.worker.incarnation == w0.instance.incarnation
    assert answer.predicted_cached_tokens == 320
    assert answer.policy == "kv"
    assert answer.predicted_ttft_ms > 0

    w0.serve(answer.attempt_id, 321, KEYS)
    await until("booked", lambda: booked(router), 0)
    view = (await router.workers())["w0"]
    assert (view.placements, view.prompt_tokens, view.cached_tokens) == (1, 321, 320)
    w0.clear()
    await until("digests", router.digests, {"w0": (0, 0), "w1": w1.digest()})


async def booked(router: Router) -> int:
    return sum(w.booked_requests for w in (await router.workers()).values())


@pytest.mark.parametrize(("policy", "shares"), [("kv", [10]), ("round-robin", [5, 5])])
async def test_same_prompt_ten_times(cluster: Cluster, policy: str, shares: list[int]) -> None:
    workers = {id: await cluster.worker(id) for id in ("w0", "w1")}
    router = await cluster.router(policy=policy)
    await both_ready(router, "w0", "w1")
    served: Counter[str] = Counter()
    for _ in range(10):
        answer = await router.route(KEYS, 330)
        worker = workers[answer.worker.id]
        assert worker.serve(answer.attempt_id, 330, KEYS) == answer.predicted_cached_tokens
        served[worker.id] += 1
        sequences = {w: workers[w].publisher.sequence for w in workers}
        await until("sequences", lambda: sequence_of(router), sequences)
    assert sorted(served.values()) == shares


async def sequence_of(router: Router) -> dict[str, int]:
    return {id: w.sequence for id, w in (await router.workers()).items()}


async def test_constraints(cluster: Cluster) -> None:
    await cluster.worker("w0")
    await cluster.worker("w1", labels={"tenants": "acme+bee", "zone": "b"})
    router = await cluster.router()
    await both_ready(router, "w0", "w1")

    async def workers_of(**fields: Any) -> set[str]:
        return {(await router.route([], 9, **fields)).worker.id for _ in range(8)}

    assert await workers_of(tenant="acme") == {"w1"}
    assert await workers_of(tenant="bee", required_labels={"zone": "b"}) == {"w1"}
    assert await workers_of(tenant="other") == await workers_of() == {"w0"}
    assert await workers_of(pinned_worker="w0", pinned_rank=0) == {"w0"}
    for fields in (
        {"tenant": "acme", "pinned_worker": "w0"},
        {"pinned_worker": "w1"},
        {"pinned_rank": 7},
        {"tenant": "acme", "required_labels": {"zone": "c"}},
    ):
        error = await failure(router.route([], 9, **fields))
        assert isinstance(error, Unavailable) and error.reason == "NO_WORKER", fields
    asked = pb.RouteRequest(model="m", block_size_tokens=16, prompt_tokens=9, tenant="acme")
    card = await router.stub.Explain(pb.ExplainRequest(request=asked), timeout=5)
    assert {c.worker.id: (c.eligible, c.reason) for c in card.candidates} == {
        "w1": (True, ""),
        "w0": (False, "the request's tenant has workers of its own"),
    }


async def test_sessions(cluster: Cluster) -> None:
    for id in ("w0", "w1"):
        await cluster.worker(id)
    routers = [await cluster.router() for _ in range(2)]
    for router in routers:
        await both_ready(router, "w0", "w1")
    homes = []
    for i in range(12):
        ids = {
            (await router.route([], 9, session_id=f"s{i}")).worker.id
            for router in routers
            for _ in range(3)
        }
        assert len(ids) == 1, "one worker, whichever router is asked"
        homes += ids
    assert set(homes) == {"w0", "w1"}
    error = await failure(routers[0].route([], 9, session_id="x" * 257))
    assert isinstance(error, InvalidRequest)


@pytest.mark.parametrize("warm", [False, True])
async def test_a_burst_does_not_herd(cluster: Cluster, warm: bool) -> None:
    """Cases, row 69."""
    names = ["w0", "w1", "w2", "w3"]
    workers = {id: await cluster.worker(id) for id in names}
    router = await cluster.router()
    await both_ready(router, *names)
    if warm:
        workers["w0"].store(KEYS)
        await until("sequence", lambda: one_sequence(router, "w0"), 1)
    stream = router.stub.RouteStream()
    for i in range(64):
        request = pb.RouteRequest(
            model="m", block_size_tokens=16, block_hashes=KEYS, prompt_tokens=330 + i % 7
        )
        await stream.write(pb.RouteStreamRequest(correlation_id=i, route=request))
    seen = {}
    shares: Counter[str] = Counter()
    for _ in range(64):
        answer = await asyncio.wait_for(stream.read(), 5)
        seen[answer.correlation_id] = answer
        shares[answer.placement.worker.id] += 1
    await stream.done_writing()
    assert set(seen) == set(range(64))
    assert len({a.placement.attempt_id for a in seen.values()}) == 64
    assert max(shares.values()) <= 2 * min(shares[n] for n in names), shares


async def one_sequence(router: Router, id: str) -> int:
    return int((await router.workers())[id].sequence)


async def test_a_gap_is_repaired_by_a_snapshot(cluster: Cluster) -> None:
    w0 = await cluster.worker("w0")
    router = await cluster.router()
    await both_ready(router, "w0")
    w0.store(KEYS)
    await until("digests", router.digests, {"w0": w0.digest()})
    taken = (await router.stats()).snapshots
    w0.lose(100)
    for key in range(50):
        w0.store([key])
        w0.remove([KEYS[0]] if key == 0 else [])
    w0.gate.clear()
    w0.store([1000])
    await until("gaps", lambda: gaps(router), 1)
    # It serves on with what it knows.
    assert (await router.route(KEYS)).worker.id == "w0"
    w0.store([1001])
    w0.gate.set()
    await until("digests", router.digests, {"w0": w0.digest()})
    assert (await router.stats()).snapshots == taken + 1


async def gaps(router: Router) -> int:
    return int((await router.stats()).gaps)


async def test_a_worker_that_hides_news_is_found_out_by_its_digest(cluster: Cluster) -> None:
    w0 = await cluster.worker("w0")
    router = await cluster.router()
    await both_ready(router, "w0")
    w0.store(KEYS)
    w0.tell_digest()
    await until("digests", router.digests, {"w0": w0.digest()})
    taken = (await router.stats()).snapshots
    w0.keep_quiet([1, 2, 3])
    w0.store([4])
    w0.tell_digest()
    await until("digests", router.digests, {"w0": w0.digest()})
    stats = await router.stats()
    assert (stats.gaps, stats.snapshots) == (0, taken + 1)

    async def drifts() -> float | None:
        figures = await asyncio.to_thread(scrape, router.metrics_address)
        return figures.get("forebay_router_index_drifts_total")

    await until("drifts", drifts, 1.0)


async def test_a_restart_in_place_leaves_no_ghosts(cluster: Cluster) -> None:
    """Cases, row 65: numbers start anew, on the same ports."""
    ports = {"port": free_port(), "events_port": free_port()}
    stack = AsyncExitStack()
    first = await stack.enter_async_context(fake_worker("w0", **ports))
    await cluster.register(first.instance, stack)
    router = await cluster.router()
    await both_ready(router, "w0")
    first.store(KEYS)
    await until("digests", router.digests, {"w0": first.digest()})
    await stack.aclose()
    second = await cluster.worker("w0", **ports)
    second.store(KEYS[:2])
    await until("digests", router.digests, {"w0": second.digest()}, timeout_s=2)
    await both_ready(router, "w0")
    view = (await router.workers())["w0"]
    assert view.worker.incarnation == second.instance.incarnation
    answer = await router.route(KEYS)
    assert answer.worker.incarnation == second.instance.incarnation
    assert answer.predicted_cached_tokens == 32


async def test_a_new_life_is_noticed_without_discovery(cluster: Cluster) -> None:
    """The old record still stands: the stream alone tells of the new life, within a second."""
    ports = {"port": free_port(), "events_port": free_port()}
    async with fake_worker("w0", **ports) as first:
        await cluster.register(first.instance)
        router = await cluster.router()
        await both_ready(router, "w0")
        first.store(KEYS)
        await until("digests", router.digests, {"w0": first.digest()})
    async with fake_worker("w0", **ports) as second:
        await until("digests", router.digests, {"w0": (0, 0)}, timeout_s=2)
        assert (await router.workers())["w0"].worker.incarnation == second.instance.incarnation


async def test_silence_makes_suspect_and_a_word_brings_back(cluster: Cluster) -> None:
    w0, w1 = await cluster.worker("w0"), await cluster.worker("w1")
    router = await cluster.router()
    await both_ready(router, "w0", "w1")
    w0.store(KEYS)
    await until("digests", router.digests, {"w0": w0.digest(), "w1": (0, 0)})
    w0.beating = False
    await until("states", router.states, {"w0": "SUSPECT", "w1": "READY"}, timeout_s=3)
    assert (await router.route(KEYS)).worker.id == "w1"
    assert (await router.digests())["w0"] == w0.digest()
    # When all are silent, one of them is chosen rather than none.
    w1.beating = False
    await until("states", router.states, {"w0": "SUSPECT", "w1": "SUSPECT"}, timeout_s=3)
    assert (await router.route(KEYS)).worker.id == "w0"
    before = w0.snapshots
    w0.beating = True
    await until("states", router.states, {"w0": "READY", "w1": "SUSPECT"})
    assert (await router.digests())["w0"] == w0.digest()
    assert (await router.route(KEYS)).worker.id == "w0"
    assert w0.snapshots == before, "nothing was missed, nothing is fetched"


async def test_a_vanished_record_keeps_the_worker(cluster: Cluster) -> None:
    stack = AsyncExitStack()
    w0 = await cluster.stack.enter_async_context(fake_worker("w0"))
    await cluster.register(w0.instance, stack)
    router = await cluster.router()
    await both_ready(router, "w0")
    w0.store(KEYS)
    await until("digests", router.digests, {"w0": w0.digest()})
    await stack.aclose()
    w0.store([1])
    await until("digests", router.digests, {"w0": w0.digest()})
    assert (await router.route(KEYS)).predicted_cached_tokens == 320
    # Refused now, and silent: nobody says any more that it exists.
    w0.beating = False
    await release_unreachable(router, w0.instance.incarnation)
    await until("workers", router.states, {}, timeout_s=4)
    error = await failure(router.route(KEYS))
    assert isinstance(error, Unavailable) and error.reason == "NO_WORKER"


async def release_unreachable(router: Router, incarnation: int, attempt_id: str = "") -> None:
    stream = router.stub.RouteStream()
    release = pb.ReleasePlacement(attempt_id=attempt_id, worker_unreachable=True)
    release.worker.id, release.worker.incarnation = "w0", incarnation
    await stream.write(pb.RouteStreamRequest(correlation_id=1, release=release))
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_an_unreachable_worker_is_out_at_once_and_back_when_heard(cluster: Cluster) -> None:
    w0, _ = await cluster.worker("w0"), await cluster.worker("w1")
    router = await cluster.router()
    await both_ready(router, "w0", "w1")
    w0.store(KEYS)
    await until("digests", router.digests, {"w0": w0.digest(), "w1": (0, 0)})
    answer = await router.route(KEYS)
    assert answer.worker.id == "w0"
    await release_unreachable(router, w0.instance.incarnation, answer.attempt_id)
    assert await booked(router) == 0
    assert (await router.route(KEYS)).worker.id == "w1"
    await until("states", router.states, {"w0": "READY", "w1": "READY"})
    assert (await router.route(KEYS)).worker.id == "w0", "its blocks were kept"
    # A report about a former life harms nobody.
    await release_unreachable(router, 12345)
    assert (await router.route(KEYS)).worker.id == "w0"


async def test_a_refused_snapshot_call_takes_a_worker_out(cluster: Cluster) -> None:
    async with fake_worker("w1") as w1:
        gone = replace(w1.instance, address="127.0.0.1:1")
        await cluster.register(gone)
        router = await cluster.router()
        await until("states", router.states, {"w1": "SUSPECT"})
        error = await failure(router.route(KEYS, pinned_worker="w1"))
        assert isinstance(error, Unavailable) and error.reason == "NO_WORKER"


async def test_serves_while_recovering(cluster: Cluster) -> None:
    w0 = await cluster.worker("w0")
    w0.gate.clear()
    router = await cluster.router()
    await until("states", router.states, {"w0": "JOINING"})
    assert (await router.route(KEYS)).worker.id == "w0"
    w0.gate.set()
    await both_ready(router, "w0")


async def test_concurrent_snapshots_are_capped(cluster: Cluster) -> None:
    names = [f"w{i}" for i in range(4)]
    workers = [await cluster.worker(n) for n in names]
    for w in workers:
        w.gate.clear()
    router = await cluster.router(snapshots_at_once=1)
    await until("states", router.states, dict.fromkeys(names, "JOINING"))
    for w in workers:
        w.gate.set()
    await both_ready(router, *names)
    assert [w.snapshots for w in workers] == [1, 1, 1, 1]


async def test_two_routers_agree_without_talking(cluster: Cluster) -> None:
    w0, w1 = await cluster.worker("w0"), await cluster.worker("w1")
    a, b = await cluster.router(id="router-a"), await cluster.router(id="router-b")
    await both_ready(a, "w0", "w1")
    await both_ready(b, "w0", "w1")
    w1.store(KEYS)
    w0.report(LoadReport(total_blocks=100, steps=1))
    for router in (a, b):
        await until("digests", router.digests, {"w0": (0, 0), "w1": w1.digest()})
    answer = await a.route(KEYS)
    w1.admit(answer.attempt_id, 321, KEYS)
    for router in (a, b):
        await until("queued", lambda r=router: queued(r), {"w0": 0, "w1": 1})  # type: ignore[misc]
    w1.finish(answer.attempt_id, 320)
    for router in (a, b):
        await until("queued", lambda r=router: queued(r), {"w0": 0, "w1": 0})  # type: ignore[misc]
    cards = [
        await r.stub.Explain(pb.ExplainRequest(request=request(KEYS)), timeout=5) for r in (a, b)
    ]
    assert [c.candidates for c in cards[:1]] == [c.candidates for c in cards[1:]]


def request(keys: list[int]) -> pb.RouteRequest:
    return pb.RouteRequest(
        model="m", block_size_tokens=16, block_hashes=keys, prompt_tokens=len(keys) * 16 + 1
    )


async def queued(router: Router) -> dict[str, int]:
    return {id: w.waiting_requests for id, w in (await router.workers()).items()} | {}


async def test_etcd_away_at_start_and_back(cluster: Cluster, tmp_path: Path) -> None:
    etcd = Etcd(tmp_path / "late")
    router = await cluster.router(etcd_endpoints=(etcd.endpoint,), discovery_grace_s=0.2)
    error = await failure(router.route(KEYS))
    assert isinstance(error, Unavailable) and error.reason == "NO_WORKER"
    with etcd:
        cluster.etcd = etcd
        w0 = await cluster.worker("w0")
        await until("states", router.states, {"w0": "READY"}, timeout_s=15)
        etcd.wipe()
        w0.store(KEYS)
        await until("digests", router.digests, {"w0": w0.digest()})
        etcd.start()
        w0.store([1, 2])
        await until("digests", router.digests, {"w0": w0.digest()})
        assert await router.states() == {"w0": "READY"}


async def test_refusals_say_what_is_wrong(cluster: Cluster) -> None:
    w0 = await cluster.worker("w0", max_model_len=1000, labels={"zone": "a"})
    router = await cluster.router()
    await both_ready(router, "w0")
    error = await failure(router.route(KEYS, model="nobody/has-it"))
    assert isinstance(error, NotFound) and error.reason == "MODEL_NOT_FOUND"
    assert "nobody/has-it" in error.message
    for field, fields in {
        "model": {"model": ""},
        "prompt_tokens": {"prompt_tokens": 0, "block_hashes": []},
        "block_size_tokens": {"block_size_tokens": 0},
        "block_hashes": {"prompt_tokens": 5},
        "token_ids": {"token_ids": [1, 2, 3]},
        "sequences": {"sequences": 5000},
    }.items():
        error = await failure(router.route(KEYS, **fields))
        assert isinstance(error, InvalidRequest) and error.field == field, (field, error)
        assert error.message.startswith(f"{field}: ")
    error = await failure(router.route([], 40, block_size_tokens=32))
    assert isinstance(error, InvalidRequest) and "16" in error.message
    error = await failure(router.route([], 2000))
    assert isinstance(error, InvalidRequest) and error.field == "prompt_tokens"
    error = await failure(router.route([], 2, block_size_tokens=0, token_ids=[1, 60_000]))
    assert isinstance(error, InvalidRequest) and error.field == "token_ids"
    for fields in (
        {"excluded_workers": ["w0"]},
        {"pinned_worker": "w9"},
        {"required_labels": {"zone": "b"}},
    ):
        error = await failure(router.route(KEYS, **fields))
        assert isinstance(error, Unavailable) and error.reason == "NO_WORKER", fields
    assert (await router.route(KEYS, required_labels={"zone": "a"})).worker.id == w0.id

    # On a stream the same words, and the stream lives on.
    stream = router.stub.RouteStream()
    for i, bad in enumerate((pb.RouteRequest(), request(KEYS))):
        await stream.write(pb.RouteStreamRequest(correlation_id=i, route=bad))
    await stream.write(pb.RouteStreamRequest(correlation_id=7))
    answers = {}
    for _ in range(3):
        answer = await asyncio.wait_for(stream.read(), 5)
        answers[answer.correlation_id] = answer
    assert answers[0].failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert answers[0].failure.reason == "INVALID_ARGUMENT"
    assert answers[1].placement.worker.id == "w0"
    assert answers[7].failure.reason == "INVALID_ARGUMENT"
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_token_ids_are_hashed_as_the_engine_does(cluster: Cluster) -> None:
    _, w1 = await cluster.worker("w0"), await cluster.worker("w1")
    router = await cluster.router()
    await both_ready(router, "w0", "w1")
    tokens = list(range(1, 6000))
    w1.store(block_keys(tokens, 16, cache_salt="s"))
    await until("digests", router.digests, {"w0": (0, 0), "w1": w1.digest()})
    fields: dict[str, Any] = {"block_size_tokens": 0, "token_ids": tokens}
    answer = await router.route([], 5999, cache_salt="s", **fields)
    assert (answer.worker.id, answer.predicted_cached_tokens) == ("w1", 374 * 16)
    assert (await router.route([], 5999, **fields)).predicted_cached_tokens == 0


async def test_explain_books_nothing(cluster: Cluster) -> None:
    w0 = await cluster.worker("w0")
    await cluster.worker("w1")
    await cluster.worker("w2", model="other")
    router = await cluster.router()
    await both_ready(router, "w0", "w1", "w2")
    w0.store(KEYS[:10])
    await until("sequence", lambda: one_sequence(router, "w0"), 1)
    for _ in range(3):
        card = await router.stub.Explain(pb.ExplainRequest(request=request(KEYS)), timeout=5)
    assert await booked(router) == 0
    best, loser, other = card.candidates
    assert (best.worker.id, best.chosen, best.eligible, best.reason) == ("w0", True, True, "")
    assert (best.g1_tokens, best.uncached_tokens, card.prompt_tokens) == (160, 161, 321)
    assert loser.score_s > best.score_s and "more than w0" in loser.reason
    assert (other.worker.id, other.eligible) == ("w2", False)
    assert "another model" in other.reason


async def test_draining_worker_and_draining_router(cluster: Cluster) -> None:
    w0, w1 = await cluster.worker("w0"), await cluster.worker("w1")
    router = await cluster.router()
    await both_ready(router, "w0", "w1")
    await cluster.registrations["w0"].update(replace(w0.instance, draining=True))
    await until("states", router.states, {"w0": "DRAINING", "w1": "READY"})
    assert {(await router.route([i])).worker.id for i in range(10)} == {w1.id}

    stream = router.stub.RouteStream()
    await stream.write(pb.RouteStreamRequest(correlation_id=1, route=request(KEYS)))
    assert (await stream.read()).placement.worker.id == "w1"
    async with open_channel(router.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING

        async def status() -> int:
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            return int(answer.status)

        assert await status() == serving
        router.life.stop()
        await until("health", status, health_pb2.HealthCheckResponse.NOT_SERVING)
    # It answers on for a moment, then ends the stream.
    await stream.write(pb.RouteStreamRequest(correlation_id=2, route=request(KEYS)))
    assert (await stream.read()).placement.worker.id == "w1"
    error = await failure(stream.read())
    assert isinstance(error, Unavailable) and error.reason == "DRAINING"
    await router.running
    assert not cluster.etcd.keys(f"/forebay/{cluster.name}/router")


async def test_bookings_expire_and_metrics_show_it(cluster: Cluster) -> None:
    w0 = await cluster.worker("w0")
    router = await cluster.router(booking_ttl_s=0.3)
    await both_ready(router, "w0")
    for _ in range(3):
        await router.route(KEYS)
    assert await booked(router) == 3
    await until("booked", lambda: booked(router), 0)
    answer = await router.route(KEYS)
    w0.serve(answer.attempt_id, 321, KEYS)

    async def shown(name: str) -> float | None:
        return (await asyncio.to_thread(scrape, router.metrics_address)).get(name)

    await until("expired", lambda: shown("forebay_router_expired_bookings_total"), 3.0)
    await until("bookings", lambda: shown("forebay_router_bookings"), 0.0)
    await until("blocks", lambda: shown("forebay_router_index_blocks"), 20.0)
    await until("actual", lambda: shown("forebay_router_actual_cached_tokens_total"), 0.0)
    placed = 'forebay_router_decisions_total{policy="kv",result="placed"}'
    assert await shown(placed) == 4.0
    assert await shown('forebay_router_workers{state="ready"}') == 1.0
    assert await shown("forebay_router_prediction_alarm") == 0.0


def scrape(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {n: float(v) for n, v in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}


async def test_grpcurl_lists_and_calls_by_reflection(cluster: Cluster) -> None:
    await cluster.worker("w0")
    router = await cluster.router()
    await both_ready(router, "w0")

    async def grpcurl(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "grpcurl"),
            *("-plaintext", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0, out.decode()
        return out.decode()

    assert "forebay.router.v1.RouterService" in await grpcurl(router.address, "list")
    service = "forebay.router.v1.RouterService"
    listed = json.loads(await grpcurl(router.address, f"{service}/ListWorkers"))
    assert listed["router_id"] == "router-0" and listed["policy"] == "kv"
    assert [w["worker"]["id"] for w in listed["workers"]] == ["w0"]
    question = json.dumps({"model": "m", "token_ids": list(range(40))})
    placed = json.loads(await grpcurl("-d", question, router.address, f"{service}/Route"))
    assert placed["worker"]["id"] == "w0" and placed["attempt_id"]
    explained = json.loads(
        await grpcurl("-d", f'{{"request": {question}}}', router.address, f"{service}/Explain")
    )
    assert explained["prompt_blocks"] == 2
    stats = json.loads(await grpcurl(router.address, f"{service}/GetIndexStats"))
    assert stats["holders"] == 1
    streamed = await grpcurl(
        "-d",
        f'{{"correlation_id": 5, "route": {question}}}',
        router.address,
        f"{service}/RouteStream",
    )
    assert json.loads(streamed)["correlation_id"] == "5"
