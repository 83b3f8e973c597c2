"""A router and the tiers of nodes: real gRPC, real event streams, real etcd, fake daemons."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from forebay.common.v1 import common_pb2
from forebay.events.v1 import events_pb2
from forebay.router.v1 import router_pb2 as pb

from services.common.events.model import Tier
from tests.fakes.node import NAMESPACE, FakeNode, fake_node
from tests.integration.router.conftest import Cluster, Router, until
from tests.integration.router.test_router import KEYS, booked, request, scrape
from tests.support.etcd import free_port


async def node_of(cluster: Cluster, id: str, **more: Any) -> FakeNode:
    node = await cluster.stack.enter_async_context(fake_node(id, **more))
    await cluster.register(node.instance)
    return node


async def nodes(router: Router) -> dict[str, Any]:
    answer = await router.stub.ListWorkers(pb.ListWorkersRequest(), timeout=5)
    return {n.node.id: n for n in answer.nodes}


async def tiers(router: Router) -> dict[str, dict[str, int]]:
    """Blocks by node and tier, where there are any."""
    return {
        id: {common_pb2.Tier.Name(t.tier)[-2:]: t.blocks for t in n.tiers if t.blocks}
        for id, n in (await nodes(router)).items()
    }


async def states(router: Router) -> dict[str, str]:
    return {
        id: pb.WorkerState.Name(n.state).removeprefix("WORKER_STATE_")
        for id, n in (await nodes(router)).items()
    }


async def ready(router: Router, workers: str, *ids: str) -> None:
    await until("states", router.states, dict.fromkeys(workers.split(), "READY"))
    await until("nodes", lambda: states(router), dict.fromkeys(ids, "READY"))


async def usable(router: Router) -> dict[str, tuple[int, ...]]:
    card = await router.stub.Explain(pb.ExplainRequest(request=request(KEYS)), timeout=5)
    return {
        c.worker.id: tuple(n // 16 for n in (c.g1_tokens, c.g2_tokens, c.g3_tokens, c.g4_tokens))
        for c in card.candidates
    }


async def test_workers_are_scored_by_the_tiers_of_their_node(cluster: Cluster) -> None:
    """By snapshot and by events; several workers of a node share its daemon."""
    n0, n1 = await node_of(cluster, "n0"), await node_of(cluster, "n1")
    n0.store(Tier.G2, KEYS[:8])
    w0 = await cluster.worker("w0", kvbm="n0")
    await cluster.worker("w1", kvbm="n0")
    await cluster.worker("w2", kvbm="n1")
    await cluster.worker("w3")
    router = await cluster.router()
    await ready(router, "w0 w1 w2 w3", "n0", "n1")
    await until("tiers", lambda: tiers(router), {"n0": {"G2": 8}, "n1": {}})
    w0.store(KEYS[:3])
    n0.store(Tier.G3, KEYS[8:12])
    n0.remove(Tier.G2, KEYS[4:8])
    n0.store(Tier.G4, KEYS[4:5])
    n1.store(Tier.G4, KEYS[:2])
    want = {"n0": {"G2": 4, "G3": 4, "G4": 1}, "n1": {"G4": 2}}
    await until("tiers", lambda: tiers(router), want)
    await until("digests", lambda: one_digest(router, "w0"), w0.digest())
    assert await usable(router) == {
        "w0": (3, 1, 0, 1),
        "w1": (0, 4, 0, 1),
        "w2": (0, 0, 0, 2),
        "w3": (0, 0, 0, 0),
    }
    answer = await router.route(KEYS)
    assert (answer.worker.id, answer.predicted_cached_tokens) == ("w0", 5 * 16)
    card = await router.stub.Explain(pb.ExplainRequest(request=request(KEYS)), timeout=5)
    assert {c.worker.id: c.onboard_s > 0 for c in card.candidates} == {
        "w0": False,  # the request just placed brings all blocks to G1
        "w1": True,
        "w2": True,
        "w3": False,
    }
    assert {id: w.kvbm for id, w in (await router.workers()).items()} == {
        "w0": "n0",
        "w1": "n0",
        "w2": "n1",
        "w3": "",
    }
    stats = await router.stats()
    assert (stats.tier_entries, stats.tier_refused_entries, len(stats.nodes)) == (11, 0, 2)
    assert stats.unknown_events == 0
    n0.clear(Tier.G2)
    await until("tiers", lambda: tiers(router), want | {"n0": {"G3": 4, "G4": 1}})


async def one_digest(router: Router, id: str) -> tuple[int, int]:
    return (await router.digests())[id]


async def test_gaps_and_new_lives_of_daemons_are_repaired(cluster: Cluster) -> None:
    ports = {"port": free_port(), "events_port": free_port()}
    stack = AsyncExitStack()
    first = await stack.enter_async_context(fake_node("n0", **ports))
    await cluster.register(first.instance)
    await cluster.worker("w0", kvbm="n0")
    router = await cluster.router()
    await ready(router, "w0", "n0")
    first.store(Tier.G2, KEYS)
    await until("tiers", lambda: tiers(router), {"n0": {"G2": 20}})
    first.lose(3)
    first.remove(Tier.G2, KEYS[10:])
    first.store(Tier.G3, KEYS[:15])
    first.rate(Tier.G2, 1e-5)
    await until("tiers", lambda: tiers(router), {"n0": {"G2": 10, "G3": 15}})
    assert first.snapshots == 2 and (await router.stats()).gaps == 1
    assert (await nodes(router))["n0"].tiers[0].block_s == 1e-5
    await stack.aclose()
    # The old record stands; the stream alone tells of the new life.
    async with fake_node("n0", **ports) as second:
        second.store(Tier.G3, KEYS[:2])
        await until("tiers", lambda: tiers(router), {"n0": {"G3": 2}})
        assert (await nodes(router))["n0"].node.incarnation == second.instance.incarnation
        assert await usable(router) == {"w0": (0, 0, 2, 0)}


async def test_a_dead_daemons_tiers_count_for_nothing_and_workers_stay(cluster: Cluster) -> None:
    n0 = await cluster.stack.enter_async_context(fake_node("n0"))
    record = AsyncExitStack()
    await cluster.register(n0.instance, record)
    n0.store(Tier.G2, KEYS)
    await cluster.worker("w0", kvbm="n0")
    router = await cluster.router(gone_after_s=2)
    await ready(router, "w0", "n0")
    assert await usable(router) == {"w0": (0, 20, 0, 0)}
    n0.beating = False
    await until("nodes", lambda: states(router), {"n0": "SUSPECT"})
    assert await usable(router) == {"w0": (0, 0, 0, 0)}
    assert (await router.route(KEYS)).predicted_cached_tokens == 0
    taken = n0.snapshots
    n0.beating = True
    await until("nodes", lambda: states(router), {"n0": "READY"})
    assert n0.snapshots == taken, "nothing was missed, nothing is fetched"
    n0.beating = False
    await record.aclose()
    await until("nodes", lambda: states(router), {})
    assert await router.states() == {"w0": "READY"}
    assert (await router.stats()).tier_entries == 0


async def test_what_does_not_explain_itself_is_dropped_and_counted(cluster: Cluster) -> None:
    """E1, E2: unknown tiers and kinds, G1, and events without a namespace are never read as G1."""
    n0 = await node_of(cluster, "n0")
    await cluster.worker("w0", kvbm="n0")
    router = await cluster.router()
    await ready(router, "w0", "n0")
    stored = events_pb2.BlocksStored(block_hashes=KEYS)

    def event(tier: int, namespace: bytes = NAMESPACE) -> events_pb2.Event:
        message = events_pb2.Event(namespace=namespace)
        message.blocks_stored.CopyFrom(stored)
        message.blocks_stored.tier = tier  # type: ignore[assignment]
        return message

    n0.publisher.sequence += 1
    envelope = events_pb2.Envelope(
        publisher="n0",
        incarnation=n0.instance.incarnation,
        sequence=n0.publisher.sequence,
        events=[
            event(0),
            event(9),
            event(1),
            event(2, b""),
            event(2, b"short"),
            events_pb2.Event(namespace=NAMESPACE),
            event(3),
        ],
    )
    n0.publisher._socket.send_multipart((b"n0", envelope.SerializeToString()))
    await until("tiers", lambda: tiers(router), {"n0": {"G3": 20}})
    assert (await router.stats()).unknown_events == 6
    assert await usable(router) == {"w0": (0, 0, 20, 0)}
    assert await one_digest(router, "w0") == (0, 0)
    assert n0.snapshots == 1, "they are no gap"


async def test_daemons_are_told_what_a_placed_request_will_want(cluster: Cluster) -> None:
    """Off the decision's path: a daemon that hangs holds nobody up, and loses only hints."""
    n0 = await node_of(cluster, "n0")
    n0.store(Tier.G2, KEYS[:4])
    n0.store(Tier.G3, KEYS[4:10])
    await cluster.worker("w0", kvbm="n0")
    router = await cluster.router(booking_ttl_s=0.2)
    await ready(router, "w0", "n0")
    await until("tiers", lambda: tiers(router), {"n0": {"G2": 4, "G3": 6}})
    await router.stub.Explain(pb.ExplainRequest(request=request(KEYS)), timeout=5)
    await router.route(KEYS)
    await until("hints", lambda: hints(n0), [(NAMESPACE, KEYS[4:10])])

    n0.gate.clear()
    stream = router.stub.RouteStream()
    for i in range(100):
        await until("booked", lambda: booked(router), 0) if i == 0 else None
        await stream.write(pb.RouteStreamRequest(correlation_id=i, route=request(KEYS)))
        answer = await stream.read()
        release = pb.ReleasePlacement(attempt_id=answer.placement.attempt_id)
        await stream.write(pb.RouteStreamRequest(release=release))
    await stream.done_writing()

    async def dropped() -> bool:
        metrics = scrape(router.metrics_address)
        return metrics.get('forebay_router_prefetch_hints_total{result="dropped"}', 0) >= 34

    await until("dropped", dropped, True)
    assert len(n0.prefetches) <= 3


async def hints(node: FakeNode) -> list[tuple[bytes, list[int]]]:
    return [(p.namespace, list(p.short_keys)) for p in node.prefetches]


async def test_a_worker_may_change_its_daemon(cluster: Cluster) -> None:
    """Its record says when it is attached, and when no longer."""
    n0 = await node_of(cluster, "n0")
    n0.store(Tier.G2, KEYS)
    w0 = await cluster.worker("w0")
    router = await cluster.router()
    await ready(router, "w0", "n0")
    assert await usable(router) == {"w0": (0, 0, 0, 0)}
    for kvbm, want in (("n0", 20), ("", 0), ("elsewhere", 0), ("n0", 20)):
        await cluster.registrations["w0"].update(replace(w0.instance, kvbm=kvbm))
        await until("usable", lambda: usable(router), {"w0": (0, want, 0, 0)})


async def test_a_node_is_told_who_else_has_the_blocks(cluster: Cluster) -> None:
    """Those of nodes that blocks are fetched from, as usable as they cost, and as a hint."""
    n0 = await node_of(cluster, "n0", transfer="nixl")
    n1 = await node_of(cluster, "n1", transfer="nixl")
    n2 = await node_of(cluster, "n2")
    n1.store(Tier.G2, KEYS[4:12])
    n2.store(Tier.G2, KEYS)
    await cluster.worker("w0", kvbm="n0")
    router = await cluster.router()
    await ready(router, "w0", "n0", "n1", "n2")
    n0.store(Tier.G2, KEYS[:4])
    await until(
        "tiers", lambda: tiers(router), {"n0": {"G2": 4}, "n1": {"G2": 8}, "n2": {"G2": 20}}
    )

    async def fetched() -> Any:
        card = await router.stub.Explain(pb.ExplainRequest(request=request(KEYS)), timeout=5)
        return [(c.g2_tokens, c.peer_tokens) for c in card.candidates]

    async def hints() -> Any:
        return [
            (list(p.short_keys), [(h.node, h.first_block, h.blocks) for h in p.peers])
            for p in n0.prefetches
        ]

    await until("usable", fetched, [(4 * 16, 8 * 16)])
    n0.rate(Tier.PEER, 1000.0)
    await until("the price", fetched, [(4 * 16, 0)])
    n0.rate(Tier.PEER, 0.0001)
    await until("the price", fetched, [(4 * 16, 8 * 16)])
    answer = await router.route(KEYS)
    assert answer.predicted_cached_tokens == 12 * 16
    await until("hints", hints, [(KEYS[4:12], [("n1", 0, 8)])])
    assert n0.prefetches[0].recompute_block_s > 0
    assert (await router.stats()).unknown_events == 0
