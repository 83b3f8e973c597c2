"""What placing a request costs, beside NVIDIA Dynamo's index and selection service, in one run:
`python -m benchmarks.router [--json] [--quick]`.

Both indexes hold the same million blocks; prompts are wholly known to one worker, which is the
longest walk. Ours decides and books in one figure; the rival's selection service only selects.
Times are medians on whatever machine this is: trust the ratios. The rival comes from PyPI into a
venv of its own; without it the benchmark fails.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import uvloop

from benchmarks.report import Report
from benchmarks.router import endtoend
from benchmarks.router.load import (
    MODEL,
    NAMESPACE,
    chain_keys,
    new_core,
    rss_bytes,
    stored,
    timed,
)
from benchmarks.router.rival import VERSION, Feed, Rival, RivalMissing
from services.common.events.model import (
    Batch,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Snapshot,
    Tier,
    TierBlocks,
)
from services.common.ids import AttemptId, BlockKey
from services.router.core.answers import Placement, Query
from services.router.core.index import PrefixIndex
from services.router.core.placement import RouterCore

BLOCKS = 1_000_000
LENGTH = 8_000
"""Blocks of the longest prompt: 128 k tokens in blocks of 16."""
TOKENS = (1_000, 8_000, 64_000, 128_000)
BLOCK_SIZES = (16, 64)
WORKERS = (2, 8, 64)
ATTEMPT = AttemptId("a")
PER_NODE = 8
"""Workers above one daemon."""
SWEEP = 2_000
"""Entries that the router frees in one go."""


def decide(core: RouterCore, queries: Sequence[Query], number: int) -> Placement:
    """One placement."""
    placed = core.place(queries[number % len(queries)], ATTEMPT, 0.5)
    assert isinstance(placed, Placement)
    return placed


def walk(index: PrefixIndex, asked: Sequence[Sequence[int]], number: int) -> dict[int, int]:
    """One look-up of a whole prompt."""
    keys = asked[number % len(asked)]
    return index.depths(keys, len(keys))


def decisions(report: Report, rival: Rival, quick: bool) -> None:
    """Find-matches and decisions, by prompt length, block size and workers."""
    chains = chain_keys(BLOCKS // LENGTH // (10 if quick else 1), LENGTH, seed=1)
    lengths = sorted({tokens // size for tokens in TOKENS for size in BLOCK_SIZES})
    table: list[dict[str, Any]] = []
    for workers in WORKERS:
        core, index = new_core(workers, 16), PrefixIndex()
        for slot in range(workers):
            index.add_holder(slot, 0)
        for batch in stored(chains, workers):
            core.apply(batch, 0.0)
            (event,) = batch.events
            assert isinstance(event, BlocksStored)
            index.store(int(batch.publisher[1:]), event.keys)
        theirs = rival.ask(
            "tree",
            workers=workers,
            chains=len(chains),
            length=LENGTH,
            batch=128,
            seed=1,
            asked=lengths,
        )["find"]
        for blocks in lengths:
            asked = [chain[:blocks] for chain in chains]
            queries = [Query(MODEL, blocks * 16 + 5, keys, 16) for keys in asked]
            find = timed(partial(walk, index, asked), 400)
            decision = timed(partial(decide, core, queries), 400, partial(core.release, ATTEMPT))
            table.append(
                {
                    "workers": workers,
                    "blocks": blocks,
                    "find_us": find.p50_us,
                    "rival_find_us": theirs[str(blocks)]["p50_us"],
                    "decision_us": decision.p50_us,
                    "decision_best_us": decision.best_us,
                    "decision_p99_us": decision.p99_us,
                }
            )
    report.raw["decisions"] = table
    cell = {(row["workers"], row["blocks"]): row for row in table}
    for blocks, goal in ((1000, 100.0), (8000, 200.0)):
        row = cell[64, blocks]
        report.add(
            f"decision, {blocks:,} blocks, 64 workers", row["decision_us"], unit=" us", goal=goal
        )
        report.add(
            f"  find-matches beside the rival's, {blocks:,} blocks",
            row["find_us"] / row["rival_find_us"],
            goal=1.0,
            note=f"{row['find_us']:.0f} us; rival {row['rival_find_us']:.0f} us",
        )


def daemons(report: Report) -> None:
    """Decisions where blocks lie in the host memory of nodes as well, from which all may fetch."""
    table = []
    for workers, blocks in ((8, 1000), (64, 1000), (64, 8000), (1000, 1000)):
        chains = chain_keys(BLOCKS // 10 // blocks, blocks, seed=5)
        plain, core = new_core(workers, 16), new_core(workers, 16, per_node=PER_NODE)
        nodes = workers // PER_NODE
        for batch in stored(chains, workers):
            for one in (plain, core):
                one.apply(batch, 0.0)
        for node in range(nodes):
            part = [key for chain in chains[node::nodes] for key in chain]
            held = TierBlocks(Tier.G2, part, namespace=NAMESPACE)
            core.nodes.reset(Snapshot(f"n{node}", 1, 0, (held,)), 0.0)
        queries = [Query(MODEL, blocks * 16 + 5, keys, 16) for keys in chains]
        without, within = (
            timed(partial(decide, one, queries), 400, partial(one.release, ATTEMPT)).p50_us
            for one in (plain, core)
        )
        table.append({"workers": workers, "blocks": blocks, "us": within, "without_us": without})
        report.add(
            f"decision with daemons beside without, {blocks:,} blocks, {workers:,} workers",
            within / without,
            note=f"{within:.0f} us, {without:.0f} us without",
        )
    report.raw["daemons"] = table


def selection(report: Report, rival: Rival, quick: bool) -> None:
    """Decisions beside those of the rival's selection service, at 64 workers."""
    workers, rng = 64, random.Random(2)
    chains = [[rng.randrange(32_000) for _ in range(128_000)] for _ in range(2 if quick else 8)]
    table = []
    with Feed(workers) as feed:
        rival.ask("workers", addresses=feed.addresses, block_size=16)
        # Its listeners connect in their own time; what is published before that is lost.
        time.sleep(2)
        before = rival.ask("cpu")["cpu_s"]
        for number, chain in enumerate(chains):
            feed.stored(number % workers, chain, 16)
        blocks = sum(len(chain) // 16 for chain in chains)
        deadline = time.monotonic() + 120
        while rival.ask("select", prompts=[chains[-1]], block_size=16, repeats=1)["matched"] == 0:
            if time.monotonic() > deadline:
                raise RivalMissing("its selection service never saw the events")
            time.sleep(0.5)
        report.raw["rival_service_event_us"] = (rival.ask("cpu")["cpu_s"] - before) / blocks * 1e6
        core = new_core(workers, 16)
        ours = chain_keys(len(chains), LENGTH, seed=2)
        for batch in stored(ours, workers):
            core.apply(batch, 0.0)
        for tokens in TOKENS:
            asked = [chain[:tokens] for chain in chains]
            theirs = rival.ask("select", prompts=asked, block_size=16, repeats=24)
            queries = [Query(MODEL, tokens, keys[: tokens // 16], 16) for keys in ours]
            mine = timed(partial(decide, core, queries), 400, partial(core.release, ATTEMPT))
            table.append(
                {
                    "tokens": tokens,
                    "decision_us": mine.p50_us,
                    "rival_hashes_us": theirs["hashes"]["p50_us"],
                    "rival_tokens_us": theirs["tokens"]["p50_us"],
                }
            )
            report.add(
                f"decision beside the rival's from hashes, {tokens:,} tokens, 64 workers",
                mine.p50_us / theirs["hashes"]["p50_us"],
                goal=1.0,
                note=f"{mine.p50_us:.0f} us; rival {theirs['hashes']['p50_us']:.0f} us from "
                f"hashes, {theirs['tokens']['p50_us']:.0f} us from tokens",
            )
    report.raw["selection"] = table


def intake(report: Report, rival: Rival, quick: bool) -> None:
    """CPU and memory of events."""
    chains = 100 if quick else 1000
    for batch in (128, 16):
        arguments = json.dumps({"chains": chains, "batch": batch})
        ours = json.loads(
            subprocess.run(
                [sys.executable, "-m", "benchmarks.router.intake", arguments],
                capture_output=True,
                check=True,
                timeout=600,
            ).stdout
        )
        with Rival() as fresh:
            theirs = fresh.ask(
                "tree", workers=64, chains=chains, length=1000, batch=batch, seed=3, asked=[1000]
            )
        report.raw[f"intake_{batch}"] = {"ours": ours, "rival": theirs}
        report.add(
            f"events, {batch} blocks each: blocks a CPU-second",
            ours["blocks_per_cpu_s"],
            goal=730_000.0 if batch == 128 else None,
            at_most=False,
            note=f"{ours['event_us']:.2f} us a block; rival {theirs['event_us']:.2f}",
        )
        report.add(
            "  bytes a block and holder",
            ours["bytes_entry"],
            goal=130.0,
            note=f"rival {theirs['bytes_block']:.0f}",
        )


def removal(report: Report) -> None:
    """How long the loop is held when a worker of 100,000 blocks goes, or says that it is empty."""
    longest = {}
    for batch in (128, 1):
        core = new_core(2, 16)
        chains = chain_keys(100, 1000, seed=6)
        for i, one in enumerate(stored(chains, 1, batch)):
            core.apply(Batch("w0", one.incarnation, i + 1, 0, one.events), 0.0)
        # A new life: the old one's blocks go in slices.
        started = time.thread_time()
        core.heard("w0", 99, 1.0)
        times = [time.thread_time() - started]
        more = True
        while more:
            started = time.thread_time()
            more = core.sweep(SWEEP)
            times.append(time.thread_time() - started)
        longest[batch] = max(times) * 1000
        assert core.index_stats().blocks == 0
    report.add("longest hold, worker of 100,000 blocks gone", longest[128], unit=" ms", goal=5.0)
    report.add("  the same, blocks that came alone", longest[1], unit=" ms", goal=5.0)
    core = new_core(2, 16)
    for one in stored(chain_keys(100, 1000, seed=6), 1):
        core.apply(one, 0.0)
    cleared = Batch("w0", 7, 10**6, 0, (BlocksCleared(Tier.G1),))
    started = time.thread_time()
    core.apply(cleared, 0.0)
    hold = time.thread_time() - started
    report.add("longest hold, cache of 100,000 blocks cleared", hold * 1000, unit=" ms", goal=5.0)


def distinct(report: Report, prompts: int) -> None:
    """Memory under so many prompts that are all different."""
    core = new_core(8, 16, capacity=2000)
    rng = random.Random(8)
    held: list[list[list[BlockKey]]] = [[] for _ in range(8)]
    sequences = [0] * 8
    marks = {}
    for number in range(prompts):
        keys = [BlockKey(rng.getrandbits(63)) for _ in range(8)]
        placed = core.place(Query(MODEL, 130, keys, 16), AttemptId(f"a{number}"), 0.5)
        assert isinstance(placed, Placement)
        core.release(placed.attempt_id)
        worker = int(placed.holder.id[1:])
        mine = held[worker]
        mine.append(keys)
        events: tuple[BlocksRemoved | BlocksStored, ...] = (BlocksStored(Tier.G1, tuple(keys)),)
        if len(mine) > 250:
            gone = mine.pop(0)
            events = (BlocksRemoved(Tier.G1, tuple(reversed(gone))), *events)
        sequences[worker] += 1
        core.apply(Batch(placed.holder.id, 7, sequences[worker], 0, events), 0.5)
        if number in (prompts // 10, prompts - 1):
            marks[number] = rss_bytes()
    first, last = marks.values()
    report.add(
        f"memory after {prompts:,} distinct prompts, beside a tenth of them",
        last / first,
        goal=1.05,
        note=f"{last >> 20} MiB",
    )
    core.check_invariants()


async def end_to_end(report: Report, seconds: float) -> None:
    """Over gRPC."""
    rows = await endtoend.measure(64, seconds)
    report.raw["end_to_end"] = [
        {name: getattr(row, name) for name in row.__slots__} for row in rows
    ]
    for row in rows:
        report.add(
            f"RouteStream, {row.blocks:,} blocks, {row.in_flight} in flight: p50",
            row.p50_ms,
            unit=" ms",
            note=f"p99 {row.p99_ms:.2f} ms, {row.per_second:.0f}/s, "
            f"{row.router_cpu_us:.0f} us CPU of the router each",
        )


def picture(report: Report) -> str:
    """The table of find-matches and decisions, for people."""
    lines = ["workers  blocks  find us  rival's  decision us  best  p99"]
    lines += [
        f"{r['workers']:7}  {r['blocks']:6}  {r['find_us']:7.1f}  {r['rival_find_us']:7.1f}"
        f"  {r['decision_us']:11.1f}  {r['decision_best_us']:4.0f}  {r['decision_p99_us']:.0f}"
        for r in report.raw["decisions"]
    ]
    return "\n".join(lines)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks and prompts")
    arguments = parser.parse_args()
    report = Report(f"router, beside ai-dynamo {VERSION}")
    try:
        with Rival() as rival:
            decisions(report, rival, arguments.quick)
            selection(report, rival, arguments.quick)
        daemons(report)
        intake(report, rival, arguments.quick)
    except RivalMissing as exc:
        print(f"the rival is missing: {exc}", file=sys.stderr)
        return 1
    removal(report)
    distinct(report, 100_000 if arguments.quick else 1_000_000)
    uvloop.run(end_to_end(report, 1.0 if arguments.quick else 4.0))
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print(report.table(), picture(report), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
