"""What a kvbm daemon publishes of its tiers is what a router understands (E2): one suite for the
real daemon and for the fake one that router tests use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Protocol

import pytest
from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc as pb_grpc

from services.common.blocks import block_key
from services.common.cards import Instance, InstanceKind
from services.common.events.model import Tier
from services.common.rpc.channel import open_channel
from services.kvbm.app import daemon
from services.kvbm.config import KvbmSettings
from services.router.adapters.discovery import node_info
from services.router.adapters.events import Followers
from services.router.core.index import Digest
from services.router.core.lives import Liveness
from services.router.core.nodes import NodeTable
from services.router.core.walk import TierWalk
from tests.fakes.node import FakeNode, fake_node
from tests.support.kvbm import NAMESPACE, chain, engine
from tests.support.polling import until

MIB = 2**20
OTHER = b"o" * 32


class Publisher(Protocol):
    """A daemon, and what the tests have it do."""

    instance: Instance

    async def save(self, keys: list[bytes], namespace: bytes) -> None:
        """Blocks come to G2."""

    async def clear(self, namespace: bytes) -> None:
        """All blocks of a namespace go."""

    def truth(self, namespace: bytes) -> dict[Tier, set[int]]:
        """What it holds, by its own books."""


class Fake:
    def __init__(self, node: FakeNode) -> None:
        self.node, self.instance = node, node.instance

    async def save(self, keys: list[bytes], namespace: bytes) -> None:
        self.node.store(Tier.G2, map(block_key, keys), namespace)

    async def clear(self, namespace: bytes) -> None:
        for space, tier in list(self.node.blocks):
            if space == namespace:
                self.node.clear(tier, namespace)

    def truth(self, namespace: bytes) -> dict[Tier, set[int]]:
        return {t: keys for (n, t), keys in self.node.blocks.items() if n == namespace and keys}


class Real:
    def __init__(self, running: object, stack: AsyncExitStack) -> None:
        self.running: object = running
        self.node = running.node  # type: ignore[attr-defined]
        self.instance: Instance = running.instance  # type: ignore[attr-defined]
        self.stack = stack

    async def save(self, keys: list[bytes], namespace: bytes) -> None:
        async with engine(self.instance.address, namespace=namespace) as one:
            await one.save(keys)

    async def clear(self, namespace: bytes) -> None:
        channel = await self.stack.enter_async_context(open_channel(self.instance.address))
        stub = pb_grpc.KvbmServiceStub(channel)  # type: ignore[no-untyped-call]
        await stub.Clear(pb.ClearRequest(namespace=namespace), timeout=5)

    def truth(self, namespace: bytes) -> dict[Tier, set[int]]:
        space = self.node.spaces[namespace]
        tiers = {t: {block_key(k) for k in space.catalog.keys(t)} for t in list(Tier)[1:]}
        return {tier: set(keys) for tier, keys in tiers.items() if keys}


@asynccontextmanager
async def publisher(kind: str, folder: Path) -> AsyncIterator[Publisher]:
    async with AsyncExitStack() as stack:
        if kind == "fake":
            yield Fake(await stack.enter_async_context(fake_node("n0")))
            return
        settings = KvbmSettings(
            id="n0",
            port=0,
            events_port=0,
            metrics_port=0,
            cpu_cache_gb=8 * MIB / 2**30,
            cpu_cache_dir=str(folder / "arenas"),
            disk_cache_gb=16 * MIB / 2**30,
            disk_cache_dir=str(folder / "disk"),
            disk_free_gb=0.0,
            scrub_mb_s=0.0,
            arena_share=0.5,
        )
        running = await stack.enter_async_context(daemon(settings))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        loops = running.caretaker.start(tasks)
        yield Real(running, stack)
        for loop in loops:
            loop.cancel()


@asynccontextmanager
async def router_side(instance: Instance) -> AsyncIterator[NodeTable]:
    """A router's table of daemons that follows one of them."""
    nodes = NodeTable(Liveness(gone_after_s=1e9), 1 << 20)
    nodes.record(node_info(instance), time.monotonic())
    async with Followers(
        {InstanceKind.KVBM: nodes},
        time.monotonic,
        snapshots_at_once=1,
        snapshot_timeout_s=5,
        on_report=lambda _: None,
    ) as followers:
        followers.follow(InstanceKind.KVBM, instance.id, instance.address, instance.events_address)
        yield nodes


def seen(nodes: NodeTable) -> dict[tuple[bytes, Tier], Digest]:
    (node,) = nodes.nodes(time.monotonic())
    return {(t.namespace, t.tier): t.digest for t in node.tiers if t.digest.blocks}


def told(publisher: Publisher, *namespaces: bytes) -> dict[tuple[bytes, Tier], Digest]:
    return {
        (namespace, tier): Digest(len(keys), reduce(xor, keys, 0))
        for namespace in namespaces
        for tier, keys in publisher.truth(namespace).items()
    }


@pytest.mark.parametrize("kind", ["fake", "real"])
async def test_a_router_knows_what_the_daemon_holds(kind: str, tmp_path: Path) -> None:
    """E2: by events, by a snapshot later on, and for each namespace apart."""
    async with publisher(kind, tmp_path) as source:
        early = chain("early", 5)
        await source.save(early, NAMESPACE)
        async with router_side(source.instance) as nodes:

            async def agree() -> object:
                return seen(nodes), told(source, NAMESPACE)

            await until(agree, lambda both: both[0] == both[1], within_s=10, what="agreement")
            later = chain("later", 200)
            await source.save(later, NAMESPACE)
            await until(agree, lambda both: both[0] == both[1], within_s=10, what="agreement")
            assert (NAMESPACE, Tier.G2) in seen(nodes)

            keys = [block_key(k) for k in early]
            held = source.truth(NAMESPACE)
            if all(k in held[Tier.G2] for k in keys):
                reach = nodes.reach("n0", NAMESPACE, time.monotonic())
                assert reach is not None
                assert TierWalk(keys, 5, reach.space).run(reach, 0).g2 == 5
                assert nodes.reach("n0", OTHER, time.monotonic()) is None

            await source.save(chain("early", 3), OTHER)

            async def both_agree() -> object:
                return seen(nodes), told(source, NAMESPACE, OTHER)

            await until(both_agree, lambda both: both[0] == both[1], within_s=10, what="agreement")
            assert seen(nodes)[OTHER, Tier.G2].blocks == 3
            await source.clear(NAMESPACE)
            await until(both_agree, lambda both: both[0] == both[1], within_s=10, what="agreement")
            assert not [n for n, _ in seen(nodes) if n == NAMESPACE]
            assert nodes.unknown_events == 0, "every event explains itself"
