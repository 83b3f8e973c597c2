"""Time to first token with blocks of another node's memory, beside computing them.

`python -m benchmarks.kvbm.far [--json]`, as root. Two hosts (network namespaces with a link between
them), on each a daemon and a worker with the real small model in float32; they meet by etcd alone.
One host computes a prompt; the other, which never saw it, is asked for it next, and for a new one.
Its daemon finds the blocks by asking, without a router's hint. Ratios are of medians. Then the link
is slower than computing: the gate shall find out, and compute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from benchmarks import report
from benchmarks.kvbm.rig import (
    BLOCK,
    G2,
    Answer,
    Daemon,
    Folders,
    Worker,
    daemon,
    folders,
    prompt,
    small_model,
    until,
    worker,
)
from benchmarks.report import Report, ratio, turns
from tests.support.etcd import Etcd
from tests.support.netns import Link, two_hosts

BLOCKS = 48
PROMPT_TOKENS = BLOCKS * BLOCK + 5
GOAL = 0.25
NOT_SLOWER = 1.05
SLOWER = 3.0
"""So many times slower than computing is the slow link."""


@dataclass(frozen=True)
class Node:
    """One host's processes."""

    kvbm: Daemon
    engine: Worker

    async def clear(self) -> None:
        """Forgets all blocks."""
        await self.engine.reset()
        await self.kvbm.clear()

    async def knows(self, peer: str) -> None:
        """Waits until its daemon knows the other one."""

        async def known() -> bool:
            return any(p.node == peer for p in (await self.kvbm.stats()).peers.known)

        if not await until(known, 30):
            raise RuntimeError(f"{self.kvbm.name} never heard of {peer}")


@dataclass
class Bench:
    """Two nodes, and what was measured: seconds to first token, by kind."""

    here: Node
    there: Node
    seconds: dict[str, list[float]] = field(default_factory=dict)
    fetched: dict[str, list[float]] = field(default_factory=dict)
    """Parts of prompts' blocks that were not computed."""

    def take(self, name: str, answer: Answer) -> None:
        """Books an answer."""
        self.seconds.setdefault(name, []).append(answer.ttft_s)
        self.fetched.setdefault(name, []).append(answer.cached / (BLOCKS * BLOCK))

    async def compute(self, name: str) -> None:
        """A new prompt, here."""
        answer = await self.here.engine.ask(prompt(PROMPT_TOKENS))
        if answer.cached:
            raise RuntimeError("a new prompt was found")
        self.take(name, answer)

    async def held_there(self) -> tuple[list[int], Answer]:
        """A prompt that the other node has computed and holds in memory."""
        tokens = prompt(PROMPT_TOKENS)
        answer = await self.there.engine.ask(tokens)
        if not await self.there.kvbm.stored(tokens, G2):
            raise RuntimeError("the other node did not save a prompt")
        return tokens, answer

    async def fetch(self, name: str, held: tuple[list[int], Answer]) -> None:
        """That prompt, here."""
        tokens, right = held
        answer = await self.here.engine.ask(tokens)
        if answer.tokens != right.tokens:
            raise RuntimeError("another answer than on the node that computed it")
        self.take(name, answer)

    async def round(self, fetched: str, computed: str) -> None:
        """One prompt of each kind; afterwards nobody holds anything."""
        await self.fetch(fetched, await self.held_there())
        await self.compute(computed)
        await self.here.clear()
        await self.there.clear()


async def node(stack: AsyncExitStack, place: Folders, link: Link, name: str, etcd: str) -> Node:
    """Starts a daemon and a worker on a host."""
    at = link.a if name == "a" else link.b
    kvbm = await stack.enter_async_context(
        daemon(place, f"kvbm-{name}", at=at, etcd_endpoints=etcd, cpu_cache_gb=0.5, disk_cache_gb=0)
    )
    flags = {"kvbm": kvbm.address, "kv_cache_gb": 0.25, "max_model_len": 2048}
    engine = await stack.enter_async_context(
        worker(f"worker-{name}", place, small_model(), flags=flags, at=at)
    )
    await kvbm.attached(1)
    return Node(kvbm, engine)


async def measure(arguments: argparse.Namespace) -> Report:
    """The link as it is, then a slow one."""
    with folders() as place, two_hosts() as link, Etcd(place.disk, host=link.control) as etcd:
        async with AsyncExitStack() as stack:
            there = await node(stack, place, link, "a", etcd.endpoint)
            here = await node(stack, place, link, "b", etcd.endpoint)
            await here.knows("kvbm-a")
            bench = Bench(here, there)
            for _ in range(2):  # rates become known, agents connect, memory is touched
                await bench.round("warm-up", "warm-up")
            for _ in turns(arguments.rounds, arguments.seconds):
                await bench.round("fetched", "computed")
            await _slow(bench, link, arguments)
    return _told(bench)


async def _slow(bench: Bench, link: Link, arguments: argparse.Namespace) -> None:
    (space,) = (await bench.here.kvbm.stats()).namespaces
    size = BLOCKS * space.geometry.shard_bytes
    computed_s = statistics.median(bench.seconds["computed"])
    link.slow(size * 8 / 1e6 / computed_s / SLOWER)
    for _ in range(arguments.slow_rounds):
        await bench.round("slow link", "computed beside slow")
    link.fast()


def _told(bench: Bench) -> Report:
    told = Report(f"TTFT / recompute, {PROMPT_TOKENS} tokens, small model in float32, two hosts")
    told.raw = {"seconds": bench.seconds, "fetched": bench.fetched}
    seconds = bench.seconds
    computed = seconds["computed"]
    told.add("recompute", statistics.median(computed), unit=" s", note=f"{len(computed)}; no ratio")
    told.add(
        "blocks of another node",
        ratio(seconds["fetched"], computed),
        goal=GOAL,
        note=_note(seconds["fetched"], bench.fetched["fetched"]),
    )
    slow, beside = seconds.get("slow link", []), seconds.get("computed beside slow", [])
    if slow:
        # The first half is the price of learning that the link has become slow.
        half = len(slow) // 2
        paid = ", ".join(f"{s / statistics.median(beside):.2f}" for s in slow[:half])
        told.add(
            f"over a link {SLOWER:.0f} times slower than computing",
            ratio(slow[half:], beside),
            goal=NOT_SLOWER,
            note=f"the gate has learned; while it did: {paid}",
        )
    return told


def _note(seconds: Sequence[float], parts: Sequence[float]) -> str:
    part = statistics.fmean(parts)
    return f"{statistics.median(seconds):.3f} s, {len(seconds)} prompts, {part:.0%} fetched"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=120, help="no round begins after that")
    parser.add_argument("--slow-rounds", type=int, default=6)


if __name__ == "__main__":
    sys.exit(report.main(__doc__, measure, _options))
