"""Nodes that share remote storage, each with an arena, and the places they share."""

import random
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.arena import NO_KEY, Arena, Geometry, SlotHeader, SlotState
from services.kvbm.tiers.object import RemoteTier, open_object_tier
from services.kvbm.tiers.objectspace import RemoteSpace
from services.kvbm.tiers.port import Transfer, Transferred
from tests.support.kvbm import NAMESPACE, chain
from tests.support.s3 import ACCESS_KEY, REGION, SECRET_KEY

GEOMETRY = Geometry(block_size=32, shard_bytes=10_001, ranks=2, layout="test")
"""Odd on purpose: neither payloads nor shards end at a page's end."""
RUN = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where remote storage is, and how to get there."""

    url: str
    endpoint: str = ""
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    nixl: bool = True
    timeout_s: float = 10.0
    ttl_s: float = 0.0

    @asynccontextmanager
    async def tier(self) -> AsyncIterator[RemoteTier]:
        """A node's view of it."""
        async with open_object_tier(
            self.url,
            self.endpoint,
            REGION,
            self.access_key,
            self.secret_key,
            run_blocks=RUN,
            timeout_s=self.timeout_s,
            ttl_s=self.ttl_s,
            nixl=self.nixl,
            file_mover=None,
        ) as tier:
            yield tier

    def apart(self) -> "Place":
        """The same, at a prefix that nobody else has."""
        return replace(self, url=f"{self.url}/{secrets.token_hex(6)}")


class Node:
    """An arena and one namespace of a tier."""

    def __init__(self, tier: RemoteTier, space: RemoteSpace, arena: Arena) -> None:
        self.tier = tier
        self.space = space
        self.arena = arena

    def fill(self, keys: Sequence[bytes]) -> list[Transfer]:
        """Puts the blocks of a chain into the slots of their numbers, whole and sealed."""
        transfers = []
        for position, key in enumerate(keys):
            self.arena.payload(position)[:] = payload(key)
            header = SlotHeader(
                SlotState.SEALED,
                generation=7,
                key=key,
                parent=keys[position - 1] if position else NO_KEY,
                position=position,
                tenant=5,
                created_ms=1_700_000_000_000,
                payload_bytes=GEOMETRY.payload_bytes,
                checksums=self.arena.checksums(position),
            )
            transfers.append(Transfer(position, header))
        return transfers

    async def store(self, keys: Sequence[bytes], timeout_s: float = 10) -> list[Transferred]:
        """Stores a chain, run by run."""
        all = self.fill(keys)
        return [
            await self.space.store(all[start : start + RUN], timeout_s)
            for start in range(0, len(keys), RUN)
        ]

    async def load(
        self, keys: Sequence[bytes], positions: Sequence[int], timeout_s: float = 10
    ) -> Transferred:
        """Loads blocks of one run into the slots of their numbers, which are emptied before."""
        return await self.space.load([self.wanted(keys, p) for p in positions], timeout_s)

    def wanted(self, keys: Sequence[bytes], position: int) -> Transfer:
        """What a load knows of a block."""
        self.arena.payload(position)[:] = bytes(GEOMETRY.payload_bytes)
        parent = keys[position - 1] if position else NO_KEY
        header = SlotHeader(SlotState.FILLING, 0, keys[position], parent, position)
        return Transfer(position, header)

    def has(self, key: bytes, slot: int) -> bool:
        """Whether the slot holds the block's bytes."""
        return bytes(self.arena.payload(slot)) == payload(key)


def payload(key: bytes) -> bytes:
    """The bytes that belong to a block."""
    return random.Random(key).randbytes(GEOMETRY.payload_bytes)


@asynccontextmanager
async def node(
    place: Place, folder: Path, namespace: bytes = NAMESPACE, slots: int = 32
) -> AsyncIterator[Node]:
    """A node whose arena lies in `folder`."""
    path = folder / f"{secrets.token_hex(4)}.arena"
    arena = Arena.create(path, namespace, GEOMETRY, slots)
    try:
        async with place.tier() as tier:
            yield Node(tier, await tier.open(namespace, arena), arena)
    finally:
        arena.close()
        path.unlink()


__all__ = ["GEOMETRY", "NAMESPACE", "RUN", "Node", "Place", "chain", "node", "payload"]
