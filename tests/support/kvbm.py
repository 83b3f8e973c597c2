"""A daemon under test, and an engine that speaks its protocol with bytes of its own.

The engine does what a real one's connector does, without a model: it attaches, locks, fills granted
slots, commits, looks up, copies and verifies.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc as pb_grpc

from services.common.arena import Arena, Geometry, SlotState, checksum
from services.common.ownerlock import OwnerLock
from services.common.rpc.channel import open_channel
from tests.support.processes import Process

SMALL = Geometry(block_size=32, shard_bytes=24_576, ranks=1, layout="test")
NAMESPACE = hashlib.sha256(b"test namespace").digest()


def chain(seed: str, blocks: int, after: bytes = bytes(32)) -> list[bytes]:
    """Hashes of a prompt's blocks; equal seeds give equal chains."""
    keys = []
    for number in range(blocks):
        after = hashlib.sha256(after + f"{seed}/{number}".encode()).digest()
        keys.append(after)
    return keys


def content(key: bytes, geometry: Geometry = SMALL) -> bytes:
    """The bytes that belong to a block: a function of its hash."""
    return random.Random(key).randbytes(geometry.shard_bytes)


@dataclass
class Engine:
    """One attached engine."""

    stub: Any
    owner: int
    lock: OwnerLock
    arena: Arena
    namespace: bytes
    rank: int = 0
    slots: list[pb.Slot] = field(default_factory=list)

    async def grant(self, count: int) -> list[pb.Slot]:
        answer = await self.stub.Grant(pb.GrantRequest(owner=self.owner, count=count), timeout=5)
        self.slots += answer.slots
        return list(answer.slots)

    def fill(self, slot: pb.Slot, data: bytes) -> int:
        self.arena.shard(slot.index, self.rank)[:] = data
        return checksum(data)

    async def save(
        self, keys: Sequence[bytes], *, tenant: str = "", first: int = 0, parent: bytes = b""
    ) -> list[int]:
        """Stores a chain's blocks; the results, one for each."""
        results: list[int] = []
        for start in range(0, len(keys), 16):
            part = keys[start : start + 16]
            while len(self.slots) < len(part):
                if not await self.grant(len(part) - len(self.slots)):
                    return results
            filled = []
            for number, key in enumerate(part, start):
                slot = self.slots.pop(0)
                total = self.fill(slot, content(key, self.arena.geometry))
                before = keys[number - 1] if number else parent
                filled.append(
                    pb.Filled(
                        slot=slot,
                        key=key,
                        parent=before,
                        position=first + number,
                        tenant=tenant,
                        checksum=total,
                    )
                )
            request = pb.CommitRequest(owner=self.owner, filled=filled)
            results += (await self.stub.Commit(request, timeout=10)).results
        return results

    async def lookup(self, keys: Sequence[bytes], **more: Any) -> pb.LookupResponse:
        more.setdefault("recompute_block_s", 10.0)
        request = pb.LookupRequest(namespace=self.namespace, keys=keys, **more)
        answer: pb.LookupResponse = await self.stub.Lookup(request, timeout=10)
        return answer

    async def ready(self, found: pb.LookupResponse, wait_ms: int = 10_000) -> Sequence[Any]:
        """The leased blocks once all promotions are over."""
        if not found.promoting:
            return list(found.ready)
        request = pb.AwaitRequest(lease=found.lease, wait_ms=wait_ms)
        return list((await self.stub.Await(request, timeout=20)).ready)

    def read(self, key: bytes, block: pb.LeasedBlock) -> bool:
        """Whether the slot holds the block, as an engine judges after its copy."""
        copied = bytes(self.arena.shard(block.slot.index, self.rank))
        try:
            header = self.arena.header(block.slot.index)
        except ValueError:
            return False
        return (
            header.state is SlotState.SEALED
            and header.key == key
            and header.generation == block.slot.generation
            and checksum(copied) == block.checksums[self.rank]
        )

    async def release(
        self, found: pb.LookupResponse, loaded: int = 0, bad: Sequence[int] = ()
    ) -> None:
        report = pb.LoadReport(
            lease=found.lease, loaded_blocks=loaded, seconds=0.001, bad_blocks=bad
        )
        await self.stub.Release(pb.ReleaseRequest(leases=[report]), timeout=5)

    async def load(self, keys: Sequence[bytes], **more: Any) -> int:
        """Looks up, copies, verifies, releases; how many leading blocks were good and right."""
        found = await self.lookup(keys, **more)
        if not found.lease:
            return 0
        ready = await self.ready(found)
        good = 0
        for key, block in zip(keys[found.first_block :], ready, strict=False):
            if not self.read(key, block):
                break
            data = bytes(self.arena.shard(block.slot.index, self.rank))
            assert data == content(key, self.arena.geometry), "wrong bytes were served as good"
            good += 1
        await self.release(found, good, range(good, len(ready)) if good < len(ready) else ())
        return good


@contextlib.asynccontextmanager
async def engine(
    address: str,
    *,
    geometry: Geometry = SMALL,
    namespace: bytes = NAMESPACE,
    rank: int = 0,
    former: int = 0,
    worker: str = "test",
    g1_bytes: int = 0,
) -> AsyncIterator[Engine]:
    """An attached engine; its lock is dropped at the end, as by its death."""
    async with open_channel(address) as channel:
        stub = pb_grpc.KvbmServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.AttachRequest(
            namespace=namespace,
            geometry=pb.Geometry(
                block_size_tokens=geometry.block_size,
                shard_bytes=geometry.shard_bytes,
                ranks=geometry.ranks,
                layout=geometry.layout,
            ),
            rank=rank,
            worker=worker,
            former_owner=former,
            g1_bytes=g1_bytes,
            model="test",
        )
        answer = await stub.Attach(request, timeout=30)
        lock = OwnerLock(Path(answer.lock_path))
        arena = Arena.open(Path(answer.arena_path))
        try:
            yield Engine(stub, answer.owner, lock, arena, namespace, rank)
        finally:
            lock.close()
            arena.close()


def daemon_process(folder: Path, *flags: str, name: str = "kvbm", id: str = "n0") -> Process:
    """A real daemon; `flags` win. Its arenas and disk lie under `folder`."""
    argv = [sys.executable, "-m", "services.kvbm", "--id", id]
    argv += ["--port", "0", "--events-port", "0", "--metrics-port", "0"]
    argv += ["--etcd-endpoints", "127.0.0.1:1", "--cpu-cache-dir", str(folder / "arenas")]
    argv += ["--ready-file", str(folder / f"{name}.ready.json"), *flags]
    return Process(name, argv, folder)
