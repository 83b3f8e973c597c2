"""Time to first token by the tier that a prompt's blocks come from, beside computing them.

`python -m benchmarks.kvbm.ttft [--json]`, with the real small model in float32 and everything else
as `forebay up` has it. Each round takes a prompt that is new (recompute), then has it in the
engine's cache (G1), in host memory (G2), on disk alone (G3) and in a shared folder alone (G4).
Ratios are of medians. Then G4 is an S3 server, and last the same over a link that is slower than
computing: the gate shall find out, and refuse.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from benchmarks import report
from benchmarks.kvbm.rig import (
    BLOCK,
    G2,
    G3,
    G4,
    Answer,
    Daemon,
    Folders,
    TierNumber,
    Worker,
    daemon,
    folders,
    prompt,
    small_model,
    worker,
)
from benchmarks.kvbm.slow import ACCESS_KEY, BUCKET, SECRET_KEY, Link, s3_server
from benchmarks.report import Report, ratio, turns

BLOCKS = 48
PROMPT_TOKENS = BLOCKS * BLOCK + 5
"""Whole runs of remote storage, and a few tokens that are always computed."""
SLOWER = 4.0
"""So many times slower than computing is the slow link."""
GOALS = {"G2": 0.12, "G3": 0.5}
NOT_SLOWER = 1.05
SETTLE_S = 30.0
"""An idle daemon writes all down after some seconds."""


@dataclass
class Times:
    """Seconds to first token, by where blocks came from; and what went wrong."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cached: dict[str, list[float]] = field(default_factory=dict)
    """Parts of the prompts' blocks that were loaded, not computed."""
    wrong: list[str] = field(default_factory=list)

    def take(self, name: str, answer: Answer) -> None:
        """Books an answer."""
        self.seconds.setdefault(name, []).append(answer.ttft_s)
        self.cached.setdefault(name, []).append(answer.cached / (BLOCKS * BLOCK))


@dataclass(frozen=True)
class Bench:
    """One engine, its daemon, and what was measured."""

    engine: Worker
    kvbm: Daemon
    times: Times

    async def fresh(self, name: str = "recompute") -> tuple[list[int], Answer]:
        """A new prompt, computed."""
        tokens = prompt(PROMPT_TOKENS)
        answer = await self.engine.ask(tokens)
        if answer.cached:
            raise RuntimeError("a new prompt was found")
        self.times.take(name, answer)
        return tokens, answer

    async def settle(self, tokens: Sequence[int], *tiers: TierNumber) -> bool:
        """Waits until a prompt is in tiers; False: it never came there."""
        if await self.kvbm.stored(tokens, *tiers, within_s=SETTLE_S):
            return True
        found = await self.kvbm.blocks_in(tokens)
        words = f"{found[G2]} in G2, {found[G3]} in G3, {found[G4]} in G4"
        self.times.wrong.append(f"of {BLOCKS} blocks {words}")
        return False

    async def load(self, tokens: Sequence[int], name: str, fresh: Answer) -> None:
        """Asks again, and books it under where its blocks are."""
        answer = await self.engine.ask(tokens)
        if answer.tokens != fresh.tokens:
            raise RuntimeError(f"another answer from {name} than a fresh one")
        self.times.take(name, answer)

    async def round(self, *, beside: str = "recompute", s3: bool = False) -> None:
        """One prompt through all tiers, or from S3 alone."""
        tokens, fresh = await self.fresh(beside)
        if not s3:
            await self.load(tokens, "G1", fresh)
        if not await self.settle(tokens, *((G2, G4) if s3 else (G2, G3, G4))):
            await self.clear(G2, G3, G4)
            return
        await self.engine.reset()
        if not s3:
            await self.load(tokens, "G2", fresh)
            await self.clear(G2)
            await self.load(tokens, "G3", fresh)
        await self.clear(G2, G3)
        await self.load(tokens, "G4, S3" if s3 else "G4", fresh)
        await self.clear(G2, G3, G4)

    async def clear(self, *tiers: TierNumber) -> None:
        """Forgets G1 and all blocks of some tiers."""
        await self.engine.reset()
        await self.kvbm.clear(*tiers)

    async def slow_rounds(self, link: Link, count: int) -> None:
        """Prompts that lie in slow storage alone, asked in turns with new ones."""
        held = []
        for _ in range(count):
            tokens, fresh = await self.fresh("recompute beside S3")
            if await self.settle(tokens, G4):
                held.append((tokens, fresh))
        await self.clear(G2, G3)
        (space,) = (await self.kvbm.stats()).namespaces
        computed_s = statistics.median(self.times.seconds["recompute beside S3"])
        link.bytes_per_s = BLOCKS * space.geometry.shard_bytes / computed_s / SLOWER
        for tokens, fresh in held:
            answer = await self.engine.ask(tokens)
            if answer.tokens != fresh.tokens:
                raise RuntimeError("another answer from slow storage than a fresh one")
            self.times.take("slow", answer)
            await self.fresh("recompute beside slow")
        link.bytes_per_s = None


@contextlib.asynccontextmanager
async def remote(place: Folders) -> AsyncIterator[Link]:
    """An S3 server behind a link."""
    async with s3_server(place.disk / "s3") as port, Link(port).open() as link:
        yield link


async def measure(arguments: argparse.Namespace) -> Report:
    """All tiers."""
    times = Times()
    with folders() as place:
        shared = place.disk / "shared"
        shared.mkdir()
        async with (
            daemon(
                place,
                cpu_cache_gb=0.5,
                disk_cache_gb=1,
                disk_write_mb_s=1000,
                remote_url=f"file://{shared}",
            ) as kvbm,
            worker(
                "worker",
                place,
                small_model(),
                flags={"kvbm": kvbm.address, "kv_cache_gb": 0.25, "max_model_len": 2048},
            ) as engine,
        ):
            await kvbm.attached(1)
            bench = Bench(engine, kvbm, times)
            for _ in range(2):  # the engine's rate becomes known, memory is touched
                await bench.fresh("warm-up")
            for _ in turns(arguments.rounds, arguments.seconds):
                await bench.round()
            if arguments.s3:
                try:
                    async with remote(place) as link:
                        await _over_s3(bench, link, arguments)
                except RuntimeError as exc:
                    times.wrong.append(f"S3: {exc}")
    return _told(times)


async def _over_s3(bench: Bench, link: Link, arguments: argparse.Namespace) -> None:
    await bench.kvbm.start(
        remote_url=f"s3://{BUCKET}/kv",
        remote_endpoint=f"http://127.0.0.1:{link.port}",
        remote_access_key=ACCESS_KEY,
        remote_secret_key=SECRET_KEY,
    )
    await bench.kvbm.attached(1)
    for _ in turns(arguments.s3_rounds, arguments.seconds / 2):
        await bench.round(beside="recompute beside S3", s3=True)
    await bench.slow_rounds(link, arguments.slow_rounds)


def _told(times: Times) -> Report:
    told = Report(f"TTFT / recompute, {PROMPT_TOKENS} tokens, small model in float32")
    told.raw = {"seconds": times.seconds, "cached": times.cached, "wrong": times.wrong}
    seconds = times.seconds
    base = seconds.get("recompute", [])
    if base:
        told.add(
            "recompute", statistics.median(base), unit=" s", note=f"{len(base)} prompts; no ratio"
        )
    for name, beside in (
        ("G1", "recompute"),
        ("G2", "recompute"),
        ("G3", "recompute"),
        ("G4", "recompute"),
        ("G4, S3", "recompute beside S3"),
    ):
        mine = seconds.get(name, [])
        note = "never there"
        if mine:
            part = statistics.fmean(times.cached[name])
            note = f"{statistics.median(mine):.3f} s, {len(mine)} prompts, {part:.0%} loaded"
        words = "G4, folder" if name == "G4" else name
        value = ratio(mine, seconds.get(beside, []))
        goal = None if name == "G1" else GOALS.get(name, NOT_SLOWER)
        told.add(words, value, goal=goal, note=note)
    slow = seconds.get("slow", [])
    if slow:
        # The first half is the price of learning that the storage has become slow.
        computed = seconds["recompute beside slow"]
        learned = slow[len(slow) // 2 :]
        told.add(
            f"G4, S3, {SLOWER:.0f} times slower than computing",
            ratio(learned, computed),
            goal=NOT_SLOWER,
            note="the gate has learned; while it did: "
            + ", ".join(f"{s / statistics.median(computed):.2f}" for s in slow[: len(slow) // 2]),
        )
    if times.wrong:
        told.add("not as planned", float(len(times.wrong)), note="; ".join(times.wrong[:3]))
    return told


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60, help="no round begins after that")
    parser.add_argument("--s3", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--s3-rounds", type=int, default=4)
    parser.add_argument("--slow-rounds", type=int, default=6)


if __name__ == "__main__":
    sys.exit(report.main(__doc__, measure, _options))
