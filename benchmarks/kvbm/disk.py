"""Reads of blocks from disk, beside fio's on the same file: `python -m benchmarks.kvbm.disk`.

All take short turns, and a ratio is the median of the turns' ratios: whatever else machine and disk
do meets both. "mover": bytes into the arena, as the tier asks for them. "verified": the tier's
whole load, headers and checksums included. fio reads the same pieces of the same file into the
same memory, as many at once, with O_DIRECT, by io_uring. Without fio (a Debian package) preadv in
as many threads as there are pieces stands in, and is named.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvloop

from services.common.arena import Arena, Geometry, SlotHeader, SlotState
from services.kvbm.movers.plain import read_piece
from services.kvbm.movers.port import FilePiece, Memory
from services.kvbm.tiers.disk import LocalDisk, open_disk_tier
from services.kvbm.tiers.port import Transfer
from services.kvbm.tiers.space import LocalSpace

GOAL = 0.85
_TIMEOUT_S = 60.0
_TURN_BYTES = 512 << 20
"""By count and not by time: what is under way at the end of a time counts for too much."""


@dataclass(frozen=True, slots=True)
class Bed:
    """A tier with blocks in it, and where to read them to."""

    disk: LocalDisk
    space: LocalSpace
    arena: Arena
    transfers: Sequence[Transfer]

    @property
    def size(self) -> int:
        """Bytes of all blocks, as they lie on disk."""
        return len(self.transfers) * self.arena.geometry.stride

    def pieces(self) -> list[FilePiece]:
        """The same blocks, as a mover is asked for them."""
        stride = self.arena.geometry.stride
        fd = self.space.files.segments[0].data
        return [
            FilePiece(
                Memory(self.arena.payload_address(item.arena_slot), stride), fd, item.slot * stride
            )
            for item in self.transfers
        ]


async def measure(folder: Path, block: int, depth: int, rounds: int, nixl: bool) -> dict[str, Any]:
    """One size of blocks at one depth: MiB/s of each, and the ratios of their medians."""
    geometry = Geometry(32, block, 1, "benchmark")
    namespace = random.Random(block * depth).randbytes(32)
    path = Path("/dev/shm") / f"forebay-benchmark-{os.getpid()}"
    arena = Arena.create(path, namespace, geometry, depth)
    room = 2 * depth * geometry.stride + (64 << 20)
    try:
        async with open_disk_tier(folder, room, 0, nixl=nixl, purge=True) as disk:
            space = await disk.open(namespace, arena)
            bed = Bed(disk, space, arena, await _filled(space, arena, depth))
            return await _compare(bed, depth, rounds)
    finally:
        arena.close()
        path.unlink()


async def _filled(space: LocalSpace, arena: Arena, count: int) -> list[Transfer]:
    size = arena.geometry.payload_bytes
    transfers = []
    for slot in range(count):
        arena.payload(slot)[:] = random.Random(slot).randbytes(size)
        header = SlotHeader(
            SlotState.SEALED,
            1,
            slot.to_bytes(32, "big"),
            payload_bytes=size,
            checksums=arena.checksums(slot),
        )
        transfers.append(Transfer(slot, header, slot))
    stored = await space.store(transfers, _TIMEOUT_S)
    assert stored.errors == [None] * count, stored.errors
    return transfers


async def _compare(bed: Bed, depth: int, rounds: int) -> dict[str, Any]:
    fio = shutil.which("fio")
    rates: dict[str, list[float]] = {"baseline": [], "mover": [], "verified": []}

    async def move() -> None:
        assert (await bed.disk.mover.read(bed.pieces(), _TIMEOUT_S)).ok

    async def load() -> None:
        loaded = await bed.space.load(bed.transfers, _TIMEOUT_S)
        assert loaded.errors == [None] * len(bed.transfers)

    turns: list[tuple[str, Callable[[], Awaitable[float]]]] = [
        ("baseline", partial(_fio, fio, bed, depth) if fio else partial(_threads, bed, depth)),
        ("mover", partial(_rate, bed, move)),
        ("verified", partial(_rate, bed, load)),
    ]
    for number in range(rounds):
        # Each begins in turn: a disk may give more to who comes after a pause.
        for name, turn in turns[number % 3 :] + turns[: number % 3]:
            rates[name].append(await turn())
    baseline, mover, verified = rates["baseline"], rates["mover"], rates["verified"]
    middle = statistics.median
    return {
        "block_kib": bed.arena.geometry.payload_bytes >> 10,
        "blocks": depth,
        "mover": bed.disk.backend,
        "baseline": "fio(io_uring,direct)" if fio else "preadv in threads(direct)",
        "baseline_mib_s": round(middle(baseline)),
        "mover_mib_s": round(middle(mover)),
        "verified_mib_s": round(middle(verified)),
        "mover_ratio": _ratios(mover, baseline)[1],
        "mover_ratio_quartiles": _ratios(mover, baseline),
        "verified_ratio": _ratios(verified, baseline)[1],
    }


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Quartiles of the turns' ratios: how much the machine's other work matters shows in them."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [round(value, 2) for value in statistics.quantiles(ratios, n=4)]


async def _rate(bed: Bed, once: Callable[[], Awaitable[None]]) -> float:
    """MiB/s of all blocks, again and again."""
    start = time.perf_counter()
    for _ in range(_repeats(bed)):
        await once()
    return bed.size * _repeats(bed) / (time.perf_counter() - start) / 2**20


def _repeats(bed: Bed) -> int:
    return max(1, _TURN_BYTES // bed.size)


async def _fio(fio: str, bed: Bed, depth: int) -> float:
    """MiB/s of the same reads by fio: the same file, pieces, depth, in batches like ours."""
    path = bed.space.files.segments[0].path.with_suffix(".data")
    # Into the same memory as ours: how its pages lie decides how large the disk's requests get.
    # It removes what it is given, so it gets another name of it.
    memory = f"{bed.arena.path}.fio"
    os.link(bed.arena.path, memory)
    process = await asyncio.create_subprocess_exec(
        fio,
        "--name=read",
        f"--filename={path}",
        "--rw=read",
        f"--bs={bed.arena.geometry.stride}",
        f"--size={bed.size}",
        f"--loops={_repeats(bed)}",
        f"--mem=mmapshared:{memory}",
        "--direct=1",
        "--ioengine=io_uring",
        f"--iodepth={depth}",
        f"--iodepth_batch_submit={depth}",
        f"--iodepth_batch_complete_min={depth}",
        "--output-format=json",
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(memory)
    read = json.loads(out)["jobs"][0]["read"]
    return float(read["io_bytes"]) / (float(read["runtime"]) / 1000) / 2**20


async def _threads(bed: Bed, depth: int) -> float:
    """MiB/s of the same reads, one thread a piece."""
    pieces = bed.pieces()
    with ThreadPoolExecutor(min(depth, 32)) as pool:

        async def once() -> None:
            assert not any(pool.map(read_piece, pieces))

        return await _rate(bed, once)


async def main(arguments: argparse.Namespace) -> int:
    """Prints the figures; 0 when the goal is met."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    results = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for block in arguments.block_kib:
            for depth in arguments.blocks:
                for nixl in (True, False) if arguments.plain else (True,):
                    results.append(
                        await measure(
                            Path(folder) / "disk", block << 10, depth, arguments.rounds, nixl
                        )
                    )
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for item in results:
            print(
                f"{item['block_kib']:5d} KiB x {item['blocks']:3d}: "
                f"{item['baseline']} {item['baseline_mib_s']} MiB/s; "
                f"{item['mover']} {item['mover_mib_s']} "
                f"({item['mover_ratio']:.2f}, quartiles {item['mover_ratio_quartiles']}), "
                f"verified {item['verified_mib_s']} ({item['verified_ratio']:.2f})"
            )
        print(f"goal: mover / baseline >= {GOAL}")
    return (
        0
        if all(item["mover_ratio"] >= GOAL for item in results[:: 2 if arguments.plain else 1])
        else 1
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="a folder on the disk to measure; default: the tmp one")
    parser.add_argument("--block-kib", type=int, nargs="+", default=[720, 4096])
    parser.add_argument("--blocks", type=int, nargs="+", default=[16], help="in one batch")
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--plain", action="store_true", help="plain I/O as well as NIXL")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(uvloop.run(main(_arguments())))
