"""A process that stores blocks on a disk until it is killed, and says what it has done.

Prints a line for each batch, "begin" before it and "done" after it: the slots and the numbers of
their blocks. Arguments: the tier's folder, a folder for the arena, the first number, a seed.
"""

import asyncio
import json
import random
import sys
from pathlib import Path

from services.kvbm.tiers import disk as disk_module
from tests.support.disks import MIB, NAMESPACE, Blocks, disk_tier

SLOTS = 48
BATCH = 6
WRITERS = 3


def say(what: str, pairs: list[tuple[int, int]]) -> None:
    sys.stdout.write(json.dumps([what, pairs]) + "\n")
    sys.stdout.flush()


async def main(folder: Path, arena: Path, number: int, seed: int) -> None:
    # Small ones, so that it grows now and then.
    disk_module._SEGMENT_BYTES = MIB
    chance = random.Random(seed)
    blocks = Blocks(arena, slots=SLOTS)
    async with disk_tier(folder) as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        for _ in space.headers():
            pass
        say("ready", [])
        count = [number]

        async def write(mine: range) -> None:
            """Stores to some of its slots, again and again; sometimes it erases them."""
            while True:
                slots = chance.sample(mine, BATCH)
                numbers = range(count[0], count[0] + BATCH)
                count[0] += BATCH
                pairs = list(zip(slots, numbers, strict=True))
                transfers = blocks.filled(numbers, slots, first=mine.start)
                say("begin", pairs)
                moved = await space.store(transfers, 10)
                assert moved.errors == [None] * BATCH, moved
                say("done", pairs)
                if chance.random() < 0.05:
                    await space.grow()
                if chance.random() < 0.2:
                    say("begin", pairs[:2])
                    await space.erase(slots[:2])
                    say("erased", pairs[:2])

        share = SLOTS // WRITERS
        await asyncio.gather(
            *(write(range(first, first + share)) for first in range(0, SLOTS, share))
        )


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
