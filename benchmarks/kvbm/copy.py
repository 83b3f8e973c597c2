"""How fast blocks go between an engine's cache (G1) and host memory (G2), beside a plain memcpy.

`python -m benchmarks.kvbm.copy [--json]`, half a minute. All ways take turns and move the same
bytes; ratios are of medians. The copies and checks are the connector's own (services/worker), one
thread, blocks in random order. Time is the thread's CPU time, so that other work on the machine
counts only by the memory it uses; on a GPU it is wall time. Without a GPU its path is unmeasured.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.common.arena import Arena, Geometry, SlotHeader, SlotState
from services.worker.connector.copier import Copier
from services.worker.connector.model import LoadItem, Slot

GOALS = {"load, verified": 0.5, "load": 0.65}
KEY = b"k" * 32


@dataclass(frozen=True, slots=True)
class Case:
    """A cache's shape."""

    name: str
    layers: int
    piece_bytes: int
    """Bytes of a block of 32 tokens in one layer."""


CASES = (
    Case("SmolLM2-135M, bf16", 30, 24 << 10),
    Case("Qwen2.5-7B, bf16", 28, 64 << 10),
    Case("Llama-3-8B, bf16", 32, 128 << 10),
    Case("tiny, float32", 4, 8 << 10),
)


class Rig:
    """A cache and an arena with blocks in both."""

    def __init__(self, case: Case, folder: Path, total: int, device: torch.device) -> None:
        shard = case.layers * case.piece_bytes
        self.count = max(8, total // shard)
        self.bytes = self.count * shard
        pool = self.count + self.count // 2
        words = torch.empty(case.layers, pool, case.piece_bytes // 2, dtype=torch.int16)
        words.random_(-30000, 30000)
        self.cache = words.to(device).view(torch.bfloat16)
        self.arena = Arena.create(
            folder / f"{shard}.arena", bytes(32), Geometry(32, shard, 1, case.name), pool
        )
        chance = random.Random(1)
        self.blocks = chance.sample(range(pool), self.count)
        self.slots = chance.sample(range(pool), self.count)
        self.checked = Copier(list(self.cache), self.arena, 0, True)
        self.believing = Copier(list(self.cache), self.arena, 0, False)
        self.items = []
        sums = self.checked.save(self.blocks, self.slots)
        for block, slot, total_sum in zip(self.blocks, self.slots, sums, strict=True):
            header = SlotHeader(
                SlotState.SEALED, 1, KEY, payload_bytes=shard, checksums=(total_sum,)
            )
            self.arena.write_header(slot, header)
            self.items.append(LoadItem(block, Slot(slot, 1), KEY, (total_sum,)))
        self._source = np.ones(self.bytes, np.uint8)
        self._target = np.zeros(self.bytes, np.uint8)
        self._shard = shard

    def close(self) -> None:
        """Gives the arena's memory back."""
        self.checked.close()
        self.believing.close()
        self.arena.close()
        self.arena.path.unlink()

    def memcpy(self) -> None:
        """The same bytes, in one piece."""
        ctypes.memmove(self._target.ctypes.data, self._source.ctypes.data, self.bytes)

    def memcpy_blocks(self) -> None:
        """The same bytes, block by block in the same random order."""
        target, source, size = self._target.ctypes.data, self._source.ctypes.data, self._shard
        order = [block % self.count for block in self.blocks]
        for to, at in zip(order, reversed(order), strict=True):
            ctypes.memmove(target + to * size, source + at * size, size)

    def load(self) -> None:
        """G2 -> G1, believed."""
        self.believing.load(self.items)

    def load_verified(self) -> None:
        """G2 -> G1, each block verified."""
        assert all(self.checked.load(self.items)), "a sound block was refused"

    def save(self) -> None:
        """G1 -> G2, with checksums."""
        self.checked.save(self.blocks, self.slots)


def measure(rig: Rig, repeat: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each way; all take turns."""
    ways: dict[str, Callable[[], None]] = {
        "memcpy": rig.memcpy,
        "memcpy by block": rig.memcpy_blocks,
        "load": rig.load,
        "load, verified": rig.load_verified,
        "save": rig.save,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeat + 1):
        for name, way in ways.items():
            began = clock()
            way()
            if turn:  # the first warms up
                seconds[name].append(clock() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def others_share(rig: Rig, seconds: float = 1.0) -> float:
    """Part of its speed that another Python thread keeps while loads run, GIL and all."""

    def count(until: Callable[[], bool]) -> int:
        number = 0
        while not until():
            number += 1
        return number

    end = time.perf_counter() + seconds
    alone = count(lambda: time.perf_counter() >= end)
    stop = threading.Event()

    def loads() -> None:
        while not stop.is_set():
            rig.load_verified()

    thread = threading.Thread(target=loads)
    thread.start()
    end = time.perf_counter() + seconds
    beside = count(lambda: time.perf_counter() >= end)
    stop.set()
    thread.join()
    return beside / alone


def run(total_mib: int, repeat: int, device: torch.device) -> dict[str, Any]:
    """All figures."""
    shm = Path("/dev/shm")
    root = shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
    results = []
    with tempfile.TemporaryDirectory(dir=root, prefix="forebay-bench-") as folder:
        for case in CASES:
            rig = Rig(case, Path(folder), total_mib << 20, device)
            clock = time.perf_counter if device.type == "cuda" else time.thread_time
            medians = measure(rig, repeat, clock)
            results.append(
                {
                    "cache": case.name,
                    "block_kib": rig.bytes // rig.count / 1024,
                    "mib": rig.bytes / 2**20,
                    "gb_s": {name: rig.bytes / s / 1e9 for name, s in medians.items()},
                    "of_memcpy": {name: medians["memcpy"] / s for name, s in medians.items()},
                    "other_thread_keeps": others_share(rig),
                }
            )
            rig.close()
    return {"device": str(device), "cpus": os.cpu_count(), "goals": GOALS, "cases": results}


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    names = list(result["cases"][0]["gb_s"])
    lines = [
        f"G1 on {result['device']}, {result['cpus']} CPUs; GB/s, and in brackets parts of memcpy",
        "cache               block KiB | " + " | ".join(f"{name:>16}" for name in names),
    ]
    for case in result["cases"]:
        cells = (f"{case['gb_s'][n]:8.2f} ({case['of_memcpy'][n]:.2f})" for n in names)
        lines.append(
            f"{case['cache']:20}{case['block_kib']:9.0f} | "
            + " | ".join(f"{cell:>16}" for cell in cells)
        )
    keeps = ", ".join(f"{case['other_thread_keeps']:.2f}" for case in result["cases"])
    lines.append(f"Speed that another Python thread keeps during loads: {keeps}")
    for name, goal in result["goals"].items():
        got = [case["of_memcpy"][name] for case in result["cases"]]
        missed = [
            f"{case['cache']} by {goal - case['of_memcpy'][name]:.2f}"
            for case in result["cases"]
            if case["of_memcpy"][name] < goal
        ]
        verdict = "missed for " + ", ".join(missed) if missed else "met"
        lines.append(f"{name}: {min(got):.2f} to {max(got):.2f} of memcpy, goal {goal}: {verdict}")
    if result["device"] == "cpu":
        lines.append("The GPU path (goal: 0.9 of pinned copies) is unmeasured: no GPU here.")
    return "\n".join(lines)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--mib", type=int, default=96, help="MiB moved by each copy")
    parser.add_argument("--repeat", type=int, default=15, help="turns")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = run(arguments.mib, arguments.repeat, device)
    print(json.dumps(result, indent=2) if arguments.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
