"""vLLM's own offloading beside ours, as far as it runs here: `python -m benchmarks.kvbm.rival`.

Its connectors to host memory refuse a CPU; what they say is printed. ExampleConnector, which keeps
whole prompts in files, runs. Measured: time to first token after G1 was lost (ratios to the same
engine's own recompute, medians), and what becomes of an answer when one byte of the stored blocks
is damaged. It loads within a step, so both engines take prompts whole.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import report
from benchmarks.kvbm.rig import (
    BLOCK,
    G2,
    Daemon,
    Folders,
    Worker,
    daemon,
    folders,
    prompt,
    small_model,
    worker,
)
from benchmarks.report import Report, ratio, turns
from services.common.arena import Arena, SlotHeader, SlotState
from services.common.blocks import block_hashes

BLOCKS = 32
PROMPT_TOKENS = BLOCKS * BLOCK + 5
OUTPUT_TOKENS = 16
SHAPE: dict[str, object] = {
    "kv_cache_gb": 0.25,
    "max_model_len": 2048,
    "engine_args": json.dumps({"max_num_batched_tokens": 2048}),
}
ON_GPUS_ALONE: dict[str, dict[str, object]] = {
    "OffloadingConnector": {"cpu_bytes_to_use": 1 << 29},
    "SimpleCPUOffloadConnector": {"cpu_bytes_to_use": 1 << 29},
}
FILES = "ExampleConnector"


def connector(name: str, extra: dict[str, object]) -> str:
    """Fields of a KVTransferConfig."""
    fields = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return json.dumps(fields)


async def why_not(place: Folders, name: str, extra: dict[str, object]) -> str:
    """Why a connector does not run here; empty: it does."""
    try:
        async with worker(
            name.lower(),
            place,
            small_model(),
            module="benchmarks.kvbm.engine",
            flags={"connector": connector(name, extra), **SHAPE},
        ):
            return ""
    except RuntimeError as exc:
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
        return lines[-1][-160:]


async def once(engine: Worker, kvbm: Daemon | None) -> tuple[float, float, bool]:
    """Seconds to first token fresh and after G1 was lost, and whether both answers were equal."""
    tokens = prompt(PROMPT_TOKENS)
    first = await engine.ask(tokens, OUTPUT_TOKENS)
    if kvbm is not None:
        await kvbm.stored(tokens, G2)
    await engine.reset()
    second = await engine.ask(tokens, OUTPUT_TOKENS)
    return first.ttft_s, second.ttft_s, first.tokens == second.tokens


async def damaged(
    engine: Worker, kvbm: Daemon | None, damage: Callable[[list[int]], None], count: int
) -> int:
    """In how many of `count` trials a damaged copy changed the answer."""
    changed = 0
    for _ in range(count):
        tokens = prompt(PROMPT_TOKENS)
        first = await engine.ask(tokens, OUTPUT_TOKENS)
        if kvbm is not None:
            await kvbm.stored(tokens, G2)
        await engine.reset()
        damage(tokens)
        second = await engine.ask(tokens, OUTPUT_TOKENS)
        changed += first.tokens != second.tokens
    return changed


def damage_arena(folder: Path) -> Callable[[list[int]], None]:
    """Damages a prompt's first block in host memory: one byte in each key and value of it."""

    def damage(tokens: list[int]) -> None:
        key = block_hashes(tokens, BLOCK)[0]
        (path,) = folder.glob("*.arena")
        arena = Arena.open(path)
        try:
            for slot, header in enumerate(arena.headers()):
                if (
                    isinstance(header, SlotHeader)
                    and header.key == key
                    and header.state is SlotState.SEALED
                ):
                    payload = arena.payload(slot)
                    _spoil(payload, 0, len(payload))
                    return
        finally:
            arena.close()
        raise RuntimeError("the block is not in the arena")

    return damage


def damage_files(folder: Path) -> Callable[[list[int]], None]:
    """Damages the newest prompt's files alike: the part of each that its first block fills."""

    def damage(tokens: list[int]) -> None:
        newest = max((d for d in folder.iterdir() if d.is_dir()), key=lambda d: d.stat().st_mtime)
        for path in newest.glob("*.safetensors"):
            data = bytearray(path.read_bytes())
            begins = 8 + int.from_bytes(data[:8], "little")
            share = (len(data) - begins) * BLOCK // PROMPT_TOKENS
            _spoil(data, begins, begins + share)
            path.write_bytes(data)

    return damage


def _spoil(data: bytearray | memoryview, first: int, end: int) -> None:
    """Turns the sign and the exponent of one float in every sixteen."""
    for at in range(first + 3, end, 64):
        data[at] ^= random.choice((0x80, 0xC0))


async def measure(arguments: argparse.Namespace) -> Report:
    """Both engines, one after the other in turns."""
    told = Report("vLLM's own offloading beside ours, small model in float32")
    with folders() as place:
        for name, extra in ON_GPUS_ALONE.items():
            why = await why_not(place, name, extra) if arguments.refusals else "not tried"
            told.add(f"vLLM {name}", None, note=why or "starts here; not measured")
        files = place.disk / "files"
        files.mkdir()
        async with (
            daemon(place, cpu_cache_gb=0.5, gate="always") as kvbm,
            worker("ours", place, small_model(), flags={"kvbm": kvbm.address, **SHAPE}) as ours,
            worker(
                "rival",
                place,
                small_model(),
                module="benchmarks.kvbm.engine",
                flags={
                    "connector": connector(FILES, {"shared_storage_path": str(files)}),
                    **SHAPE,
                },
            ) as rival,
        ):
            await kvbm.attached(1)
            seconds: dict[str, tuple[list[float], list[float]]] = {
                "ours": ([], []),
                "rival": ([], []),
            }
            equal = {"ours": True, "rival": True}
            for engine, behind in ((ours, kvbm), (rival, None)):
                await once(engine, behind)  # warms up
            for _ in turns(arguments.rounds, arguments.seconds):
                for name, engine, behind in (("ours", ours, kvbm), ("rival", rival, None)):
                    fresh_s, again_s, same = await once(engine, behind)
                    seconds[name][0].append(fresh_s)
                    seconds[name][1].append(again_s)
                    equal[name] &= same
            changed = {
                "ours": await damaged(
                    ours, kvbm, damage_arena(place.memory / "kvbm"), arguments.trials
                ),
                "rival": await damaged(rival, None, damage_files(files), arguments.trials),
            }
    told.raw = {"seconds": seconds, "changed": changed, "equal": equal}
    for name, words in (("ours", "kvbm, G2"), ("rival", f"vLLM {FILES}, files")):
        fresh, again = seconds[name]
        told.add(
            f"{words}: TTFT after G1 was lost / recompute",
            ratio(again, fresh),
            note=f"{statistics.median(again):.3f} s of {statistics.median(fresh):.3f} s; "
            f"answers {'equal' if equal[name] else 'DIFFER'}",
        )
    for name, words in (("ours", "kvbm"), ("rival", f"vLLM {FILES}")):
        told.add(
            f"{words}: answers changed by damaged blocks",
            float(changed[name]),
            goal=0.0 if name == "ours" else None,
            note=f"of {arguments.trials}",
        )
    return told


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60, help="no round begins after that")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--refusals", action=argparse.BooleanOptionalAction, default=True)


if __name__ == "__main__":
    sys.exit(report.main(__doc__, measure, _options))
