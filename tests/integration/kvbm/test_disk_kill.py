"""kill -9 in the middle of stores: the next start finds what was done, and nothing half done."""

import asyncio
import contextlib
import json
import random
import sys
from pathlib import Path

import pytest

from tests.support.disk_writer import SLOTS
from tests.support.disks import MIB, NAMESPACE, Blocks, disk_tier, key_of, sealed

ROOT = Path(__file__).resolve().parents[3]
KILLS = 6


@pytest.mark.chaos
async def test_a_killed_writer_loses_nothing_and_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1, C12: what was stored is found where it was stored, nothing else is, no byte is off."""
    monkeypatch.setattr("services.kvbm.tiers.disk._SEGMENT_BYTES", MIB)
    chance = random.Random(5)
    before: dict[int, set[int | None]] = {slot: {None} for slot in range(SLOTS)}
    number, stored = 1, 0
    for kill in range(KILLS):
        arena = tmp_path / f"arena-{kill}"
        arena.mkdir()
        lines = await _run_and_kill(tmp_path / "disk", arena, number, chance)
        for what, pairs in lines:
            for slot, block in pairs:
                number = max(number, block + 1)
                if what == "begin":
                    # From here on: the old one, nothing, or the new one.
                    before[slot] |= {None, block}
                elif what == "done":
                    before[slot] = {block}
                    stored += 1
                elif what == "erased":
                    before[slot] = {None}
        blocks = Blocks(arena, slots=SLOTS)
        async with disk_tier(tmp_path / "disk") as disk:
            space = await disk.open(NAMESPACE, blocks.arena)
            found = sealed(space)
            for slot, may in before.items():
                header = found.get(slot)
                assert (header and header.created_ms) in may
                before[slot] = {header and header.created_ms}
            assert all(header.key == key_of(header.created_ms) for header in found.values())
            transfers = blocks.filled([header.created_ms for header in found.values()], found)
            blocks.cleared(transfers)
            assert (await space.load(transfers, 10)).errors == [None] * len(transfers)
            assert all(blocks.holds(transfer) for transfer in transfers)
            assert set(found) <= set(range(SLOTS))
        blocks.arena.close()
    assert stored > 100


async def _run_and_kill(
    folder: Path, arena: Path, number: int, chance: random.Random
) -> list[tuple[str, list[tuple[int, int]]]]:
    """Lets a writer run, and kills it after some of its lines; all lines that it wrote."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.disk_writer",
        str(folder),
        str(arena),
        str(number),
        str(chance.randrange(1 << 30)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    lines: list[tuple[str, list[tuple[int, int]]]] = []
    try:
        async with asyncio.timeout(30):
            for _ in range(chance.randrange(20, 200)):
                line = await process.stdout.readline()
                assert line, "the writer has ended by itself"
                if line.startswith(b"["):
                    lines.append(json.loads(line))
            await asyncio.sleep(chance.random() / 100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        rest = await process.stdout.read()
        await process.wait()
    # The last line may have been cut off by the kill: then it was not said.
    lines += [json.loads(line) for line in rest.splitlines(keepends=True)
              if line.startswith(b"[") and line.endswith(b"\n")]  # fmt: skip
    return lines
