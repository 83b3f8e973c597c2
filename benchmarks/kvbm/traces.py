"""Hits of eviction and writes to disk on recorded traces: `python -m benchmarks.kvbm.traces`.

A request finds the leading blocks of its prompt that are stored; what follows a hole is of no use
and counts as missing, for every policy alike. The rest is computed and stored, in order, as by the
daemon. Belady's optimum knows the future; no policy reaches it. The second table is a host memory
and a disk of four times its size, with our eviction in both: hits with what the offload plan wrote,
beside a disk that every new block is written to.

`--data` names the folder of the traces (Mooncake's format: JSON lines with `timestamp` in
milliseconds and `hash_ids`). All is deterministic; it takes a good half hour on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from services.common.arena import NO_KEY
from services.common.events.model import Tier
from services.kvbm.core.eviction import Eviction, new_eviction
from services.kvbm.core.model import BlockMeta
from services.kvbm.core.offload import OffloadPlan, WriteBudget

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
SIZES = (2000, 4000, 8000, 16000, 32000, 64000)
RIVALS = ("lru", "arc", "s3fifo")
TWO_TIERS = (2000, 8000)
DISK = 4
"""Size of the disk, in sizes of host memory."""
ROUND_S = 0.5
"""Seconds between the daemon's rounds in a pause."""
ABOVE_LRU = 16000
"""Up to this size hits shall be more than LRU's."""
MOST_WRITTEN = 0.5


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt."""

    time_s: float
    keys: tuple[bytes, ...]


@cache
def load(path: Path) -> list[Request]:
    """A trace, with keys as long as real ones."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    keys: dict[int, bytes] = {}
    for row in rows:
        for id in row["hash_ids"]:
            if id not in keys:
                keys[id] = hashlib.blake2b(str(id).encode(), digest_size=32).digest()
    rows.sort(key=lambda row: row["timestamp"])
    ticks = [(time, list(same)) for time, same in groupby(rows, key=lambda row: row["timestamp"])]
    requests: list[Request] = []
    for number, (time, same) in enumerate(ticks):
        # The clock of Mooncake's trace ticks every 3 s: what arrives at once is spread over it.
        pause = ticks[number + 1][0] - time if number + 1 < len(ticks) else 0
        for turn, row in enumerate(same):
            found = tuple(keys[id] for id in row["hash_ids"])
            requests.append(Request((time + pause * turn / len(same)) / 1000, found))
    return requests


def leading(keys: Sequence[bytes], there: Callable[[bytes], bool]) -> int:
    """How many blocks of a prompt are found, up to the first that isn't."""
    return next((n for n, key in enumerate(keys) if not there(key)), len(keys))


def nobody(_: bytes) -> bool:
    """Spares no block."""
    return False


def replay(trace: Path, kind: str, capacity: int) -> int:
    """Blocks found by a policy of `new_eviction`, or by "belady"."""
    if kind == "belady":
        return belady(load(trace), capacity)
    policy, hits = new_eviction(capacity, kind), 0
    for request in load(trace):
        keys = request.keys
        found = leading(keys, policy.__contains__)
        hits += found
        policy.touch(keys[:found])
        rest = range(found, len(keys))
        # Those that keep no chains get them as suits them best, the tail first.
        for position in rest if kind == "default" else reversed(rest):
            store(policy, capacity, keys, position)
    return hits


def store(policy: Eviction, capacity: int, keys: Sequence[bytes], position: int) -> None:
    """A block was computed, and another goes if it must."""
    key = keys[position]
    while key not in policy and len(policy) >= capacity:
        victim = policy.victim(nobody)
        assert victim is not None
        policy.remove(victim)
    policy.add(key, position, parent=keys[position - 1] if position else NO_KEY)


def belady(requests: Sequence[Request], capacity: int) -> int:
    """Evicts what is used again latest, of a prompt its tail first; stores nothing in vain."""
    never = len(requests)
    following: dict[bytes, int] = {}
    plans: list[list[int]] = []
    for number in reversed(range(never)):
        keys = requests[number].keys
        plans.append([following.get(key, never) for key in keys])
        following.update(dict.fromkeys(keys, number))
    plans.reverse()
    cached: dict[bytes, int] = {}
    latest: list[tuple[int, int, bytes]] = []
    hits = 0
    for request, plan in zip(requests, plans, strict=True):
        hits += leading(request.keys, cached.__contains__)
        for position, (key, use) in enumerate(zip(request.keys, plan, strict=True)):
            if use < never or key in cached:
                cached[key] = use
                heapq.heappush(latest, (-use, -position, key))
        while len(cached) > capacity:
            use, _, key = heapq.heappop(latest)
            if cached.get(key) == -use:
                del cached[key]
    return hits


class TwoTiers:
    """Host memory and disk, as far as the offload plan sees them."""

    def __init__(self, capacity: int) -> None:
        self.sizes = {Tier.G2: capacity, Tier.G3: DISK * capacity}
        self.evictions = {tier: new_eviction(size) for tier, size in self.sizes.items()}
        self.metas: dict[bytes, BlockMeta] = {}
        self.written = 0

    def tiers_of(self, key: bytes) -> tuple[Tier, ...]:
        """Tiers that hold a block."""
        return tuple(tier for tier, eviction in self.evictions.items() if key in eviction)

    def meta(self, key: bytes) -> BlockMeta | None:
        """What a block is."""
        return self.metas.get(key)

    def put(self, tier: Tier, key: bytes, *, reused: bool = False) -> None:
        """A block appears in a tier, and another goes if it must."""
        eviction, meta = self.evictions[tier], self.metas[key]
        while key not in eviction and len(eviction) >= self.sizes[tier]:
            victim = eviction.victim(nobody)
            assert victim is not None
            eviction.remove(victim)
        self.written += tier is Tier.G3
        eviction.add(key, meta.position, reused=reused, parent=meta.parent)


def offload(trace: Path, capacity: int, *, through: bool) -> tuple[int, int, int]:
    """Hits in memory, hits on disk, blocks written: with our plan, or each new block `through`."""
    tiers = TwoTiers(capacity)
    g2, g3 = tiers.evictions[Tier.G2], tiers.evictions[Tier.G3]
    plan = OffloadPlan(tiers.evictions, WriteBudget(1e15), 1)
    hits = {Tier.G2: 0, Tier.G3: 0}

    def down(now_s: float) -> None:
        while chosen := plan.choose(tiers, Tier.G2, Tier.G3, now_s, 16):
            for key in chosen:
                tiers.put(Tier.G3, key)

    now_s = 0.0
    for request in load(trace):
        keys = request.keys
        while not through and now_s + ROUND_S < request.time_s:
            now_s += ROUND_S
            down(now_s)
        now_s = request.time_s
        for position, key in enumerate(keys):
            tiers.metas[key] = BlockMeta(key, keys[position - 1] if position else NO_KEY, position)
        found = leading(keys, lambda key: key in g2 or key in g3)
        below = [key for key in keys[:found] if key not in g2]
        hits[Tier.G3] += len(below)
        hits[Tier.G2] += found - len(below)
        g2.touch(keys[:found])
        g3.touch(keys[:found])
        for key in below:
            tiers.put(Tier.G2, key, reused=True)
        for key in keys[found:]:
            new = key not in g2
            tiers.put(Tier.G2, key)
            if new:
                plan.stored(key, request.time_s)
            if through and key not in g3:
                tiers.put(Tier.G3, key)
        if not through:
            down(now_s)
    return hits[Tier.G2], hits[Tier.G3], tiers.written


def one_trace(pool: ProcessPoolExecutor, trace: Path) -> dict[str, Any]:
    """All figures of a trace."""
    kinds = ("default", *RIVALS, "belady")
    jobs = {(k, size): pool.submit(replay, trace, k, size) for size in SIZES for k in kinds}
    pairs = {
        (size, through): pool.submit(offload, trace, size, through=through)
        for size in TWO_TIERS
        for through in (False, True)
    }
    eviction = {}
    for size in SIZES:
        hits = {kind: jobs[kind, size].result() for kind in kinds}
        best = max(hits[kind] for kind in RIVALS)
        eviction[size] = {
            "hits": hits,
            "of_best_online": hits["default"] / best,
            "of_lru": hits["default"] / hits["lru"],
            "of_belady": hits["default"] / hits["belady"],
        }
    written = {}
    for size in TWO_TIERS:
        ours, through = pairs[size, False].result(), pairs[size, True].result()
        written[size] = {
            "hits": {"g2": ours[0], "g3": ours[1]},
            "hits_write_through": {"g2": through[0], "g3": through[1]},
            "written_of_write_through": ours[2] / through[2],
            "hits_of_write_through": (ours[0] + ours[1]) / (through[0] + through[1]),
        }
    return {"eviction": eviction, "offload": written}


def missed(figures: dict[str, Any]) -> list[str]:
    """Goals that a trace misses, in words."""
    words = []
    for size, row in figures["eviction"].items():
        if row["of_best_online"] < 1:
            words.append(f"{size} blocks: {row['of_best_online']:.4f} of the best online policy")
        if size <= ABOVE_LRU and row["of_lru"] <= 1:
            words.append(f"{size} blocks: {row['of_lru']:.4f} of LRU")
    for size, row in figures["offload"].items():
        if row["written_of_write_through"] > MOST_WRITTEN:
            words.append(f"{size} blocks: {row['written_of_write_through']:.3f} are written")
    return words


def show(name: str, figures: dict[str, Any]) -> None:
    """Prints a trace's tables."""
    kinds = ("lru", "arc", "s3fifo", "default", "belady")
    print(f"{name}: blocks found")
    print(f"{'blocks':>8}" + "".join(f"{k.replace('default', 'ours'):>9}" for k in kinds), end="")
    print("   / best online  / LRU  / Belady")
    for size, row in figures["eviction"].items():
        print(f"{size:>8}" + "".join(f"{row['hits'][kind]:>9}" for kind in kinds), end="")
        print(f"{row['of_best_online']:>16.3f}{row['of_lru']:>7.3f}{row['of_belady']:>10.3f}")
    print(f"{name}: memory, and a disk of {DISK} times its size, beside write-through")
    print(f"{'blocks':>8}   G2 + G3 hits   write-through   / hits  / written")
    for size, row in figures["offload"].items():
        ours, through = row["hits"], row["hits_write_through"]
        print(f"{size:>8}{ours['g2']:>8} +{ours['g3']:>6}", end="")
        print(f"{through['g2']:>8} +{through['g3']:>6}", end="")
        print(f"{row['hits_of_write_through']:>9.3f}{row['written_of_write_through']:>11.3f}")
    for words in missed(figures):
        print(f"missed: {words}")
    print()


def main() -> int:
    """Measures and prints; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with *.jsonl traces")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    traces = sorted(arguments.data.glob("*.jsonl"))
    if not traces:
        print(f"no traces (*.jsonl) in {arguments.data}; name their folder by --data")
        return 2
    results = {}
    with ProcessPoolExecutor() as pool:
        for trace in traces:
            results[trace.stem] = figures = one_trace(pool, trace)
            if not arguments.json:
                show(trace.stem, figures)
    if arguments.json:
        print(json.dumps(results, indent=2))
    return int(any(missed(figures) for figures in results.values()))


if __name__ == "__main__":
    sys.exit(main())
