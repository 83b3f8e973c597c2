"""An engine without a model: it attaches to a daemon and stores blocks of zeros."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc

from services.common.arena import Arena, checksum
from services.common.ownerlock import OwnerLock
from services.common.rpc.channel import open_channel

BATCH = 32


@dataclass(frozen=True, slots=True)
class BareEngine:
    """An attached one."""

    stub: Any
    owner: int
    arena: Arena

    async def save(self, keys: Sequence[bytes], *, chained: bool, batch: int = BATCH) -> None:
        """Stores blocks: of one prompt in their order, or each of a prompt of its own."""
        for start in range(0, len(keys), batch):
            part = keys[start : start + batch]
            grant = pb.GrantRequest(owner=self.owner, count=len(part))
            granted = await self.stub.Grant(grant, timeout=10)
            filled = []
            for number, (slot, key) in enumerate(zip(granted.slots, part, strict=False), start):
                shard = self.arena.shard(slot.index, 0)
                shard[:] = bytes(len(shard))
                filled.append(
                    pb.Filled(
                        slot=slot,
                        key=key,
                        parent=keys[number - 1] if chained and number else b"",
                        position=number if chained else 0,
                        checksum=checksum(shard),
                    )
                )
            commit = pb.CommitRequest(owner=self.owner, filled=filled)
            answer = await self.stub.Commit(commit, timeout=10)
            if len(filled) < len(part) or set(answer.results) != {pb.COMMIT_RESULT_STORED}:
                raise RuntimeError(f"not stored: {len(filled)} slots, {set(answer.results)}")


@asynccontextmanager
async def bare_engine(
    address: str, namespace: bytes, geometry: pb.Geometry
) -> AsyncIterator[BareEngine]:
    """An attached engine; its lock is dropped at the end, as by its death."""
    async with open_channel(address) as channel:
        stub = kvbm_pb2_grpc.KvbmServiceStub(channel)
        request = pb.AttachRequest(namespace=namespace, geometry=geometry, worker="bare")
        attached = await stub.Attach(request, timeout=30)
        lock = OwnerLock(Path(attached.lock_path))
        arena = Arena.open(Path(attached.arena_path))
        try:
            yield BareEngine(stub, attached.owner, arena)
        finally:
            arena.close()
            lock.close()
