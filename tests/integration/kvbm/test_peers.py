"""Daemons that fetch blocks from each other's memory: real windows, real NIXL, real gRPC."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forebay.kvbm.v1 import kvbm_pb2 as pb

from services.common.blocks import block_key
from services.kvbm.core.peers import PeerId, PeerInfo
from tests.support.kvbm import NAMESPACE, SMALL, Engine, chain, engine
from tests.support.polling import until

BLOCKS = 40
"""Of 24 KiB: more than fit into a round of the window of 1 MiB."""


def meet(a: Any, b: Any) -> None:
    """Each learns of the other, as by discovery."""
    for one, other in ((a, b), (b, a)):
        instance = other.daemon.instance
        info = PeerInfo(PeerId(instance.id), instance.incarnation, instance.address)
        one.daemon.node.peers.record(info)


@pytest.fixture
def pair(rig: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`async with pair() as (a, b)`: two daemons that know each other."""

    @contextlib.asynccontextmanager
    async def run(**more: Any) -> AsyncIterator[tuple[Any, Any]]:
        values = {"peers": "on", "peer_window_mb": 1, "gate": "always", "promote_ms": 30_000}
        values |= {"peer_timeout_s": 10, **more}
        async with (
            rig(folder=tmp_path / "a", id="a", **values) as a,
            rig(folder=tmp_path / "b", id="b", **values) as b,
        ):
            meet(a, b)
            yield a, b

    return run


def counts(rig: Any) -> Any:
    return rig.daemon.node.metrics.counts


async def at_rest(*rigs: Any) -> None:
    """Waits until nothing is held for peers or of them, and fails when it stays."""

    async def held() -> list[int]:
        found = []
        for rig in rigs:
            node = rig.daemon.node
            fetches = [m.fetches for m in node.moves.values()]
            found += [len(node.peers.exports.window), node.peers.exports.window.used]
            found += [f.running for f in fetches] + [f.quarantined for f in fetches]
            for space in node.spaces.values():
                seen = space.catalog.counts()
                found += [seen.leases, seen.copies, *(t.quarantined for t in seen.tiers.values())]
                space.catalog.check_invariants()
            node.peers.exports.window.check_invariants()
            node.peers.book.check_invariants()
        return found

    await until(held, lambda n: not any(n), within_s=15, what="rest")


async def test_a_prefix_of_one_node_serves_another(pair: Callable[..., Any]) -> None:
    """By own look-up: asked, fetched in several rounds, verified, and then there to stay."""
    keys = chain("shared", BLOCKS)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        await writer.save(keys)
        assert await reader.load(keys, wait_s=5.0) == BLOCKS
        assert counts(b)["peer_blocks_in"] == counts(a)["peer_blocks_out"] == BLOCKS
        assert await reader.load(keys, wait_s=5.0) == BLOCKS
        assert counts(b)["peer_blocks_in"] == BLOCKS  # the second time from its own memory
        stats = await b.stub.Stats(pb.StatsRequest(), timeout=5)
        assert stats.peers.state.startswith("ok")
        (known,) = stats.peers.known
        assert (known.node, known.state, known.fetched_blocks) == ("a", "connected", BLOCKS)
        await at_rest(a, b)
