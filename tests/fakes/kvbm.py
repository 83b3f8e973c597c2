"""A kvbm daemon in one class: a real arena, real locks, real gRPC, and none of the real policies.

G2 alone, first in first out; what `later` names is "promoting" until `promote` is called. For tests
of the connector and of the worker's shell.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc

from services.common.arena import NO_KEY, Arena, Geometry, SlotHeader, SlotState
from services.common.errors import FailedPrecondition, NotFound
from services.common.rpc.server import RpcServer, Service, rpc_server


@dataclass
class Stored:
    """A block in a slot."""

    key: bytes
    slot: int
    generation: int
    checksum: int
    hidden: bool = False
    """In a lower tier, as far as look-ups tell."""


class FakeKvbm(kvbm_pb2_grpc.KvbmServiceServicer):
    """The daemon. Its state may be read and changed by tests on the loop's thread."""

    def __init__(self, folder: Path, *, slots: int = 256, node: str = "node-fake") -> None:
        self.folder = folder
        self.node = node
        self.incarnation = secrets.randbits(63) | 1
        self.arena: Arena | None = None
        self.calls: Counter[str] = Counter()
        self.owners: dict[int, Path] = {}
        self.workers: dict[int, str] = {}
        self.granted: dict[int, dict[int, int]] = {}
        """By owner: generation by slot."""
        self.blocks: dict[bytes, Stored] = {}
        self.leases: dict[int, tuple[list[bytes], int]] = {}
        self.reports: list[pb.LoadReport] = []
        self.lookups: list[pb.LookupRequest] = []
        self.committed: list[pb.Filled] = []
        self.delay_s = 0.0
        """Every answer waits so long."""
        self.verify = True
        self.grant = True
        self._slots = slots
        self._free: list[int] = list(range(slots))
        self._generations = [0] * slots
        self._promoted = asyncio.Event()

    @property
    def arena_path(self) -> Path:
        return self.folder / "arena"

    async def _begin(self, name: str) -> None:
        self.calls[name] += 1
        if self.delay_s:
            await asyncio.sleep(self.delay_s)

    async def Attach(self, request: pb.AttachRequest, context: object) -> pb.AttachResponse:
        await self._begin("Attach")
        g = request.geometry
        geometry = Geometry(g.block_size_tokens, g.shard_bytes, g.ranks, g.layout)
        if self.arena is None and self.arena_path.exists():
            self._adopt()
        if self.arena is None:
            self.arena = Arena.create(self.arena_path, request.namespace, geometry, self._slots)
        if (self.arena.namespace, self.arena.geometry) != (request.namespace, geometry):
            raise FailedPrecondition("another geometry", reason="GEOMETRY_MISMATCH")
        self.give_back(request.former_owner)
        owner = secrets.randbits(63) | 1
        lock = self.folder / f"owner-{owner:016x}"
        lock.touch()
        self.owners[owner], self.granted[owner] = lock, {}
        self.workers[owner] = request.worker
        return pb.AttachResponse(
            owner=owner,
            lock_path=str(lock),
            arena_path=str(self.arena_path),
            incarnation=self.incarnation,
            node=self.node,
            verify=self.verify,
        )

    def _adopt(self) -> None:
        self.arena = Arena.open(self.arena_path)
        for slot, header in enumerate(self.arena.headers()):
            if isinstance(header, SlotHeader):
                self._generations[slot] = header.generation
                if header.state is SlotState.SEALED:
                    self._free.remove(slot)
                    self.blocks[header.key] = Stored(
                        header.key, slot, header.generation, header.checksums[0]
                    )
                elif header.state is SlotState.FILLING:
                    # Its owner may still write: it comes back when that owner says so, or is dead.
                    self._free.remove(slot)
                    self.granted.setdefault(header.owner, {})[slot] = header.generation

    def give_back(self, owner: int) -> None:
        for slot in self.granted.pop(owner, {}):
            self._set(slot, SlotState.FREE)
            self._free.append(slot)
        self.owners.pop(owner, None)

    def alive(self, owner: int) -> bool:
        """Whether somebody holds the owner's lock."""
        fd = os.open(self.owners[owner], os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    async def Detach(self, request: pb.DetachRequest, context: object) -> pb.DetachResponse:
        await self._begin("Detach")
        self.give_back(request.owner)
        return pb.DetachResponse()

    async def Grant(self, request: pb.GrantRequest, context: object) -> pb.GrantResponse:
        await self._begin("Grant")
        self._check(request.owner)
        return pb.GrantResponse(
            slots=self._grant(request.owner, request.count), incarnation=self.incarnation
        )

    def _check(self, owner: int) -> None:
        if owner not in self.owners:
            raise NotFound("not attached", reason="NOT_ATTACHED")
        if not self.alive(owner):
            raise FailedPrecondition("not locked", reason="NOT_LOCKED")

    def _grant(self, owner: int, count: int) -> list[pb.Slot]:
        slots = []
        while self.grant and len(slots) < count:
            if not self._free and not self._evict():
                break
            slot = self._free.pop(0)
            self._generations[slot] += 1
            self._set(slot, SlotState.FILLING, owner=owner)
            self.granted[owner][slot] = self._generations[slot]
            slots.append(pb.Slot(index=slot, generation=self._generations[slot]))
        return slots

    def _evict(self) -> bool:
        leased = {key for keys, _ in self.leases.values() for key in keys}
        for key, block in self.blocks.items():
            if key not in leased:
                self.forget(key)
                return block.slot in self._free
        return False

    def forget(self, key: bytes) -> None:
        """Frees a block's slot."""
        block = self.blocks.pop(key)
        self._set(block.slot, SlotState.FREE)
        self._free.append(block.slot)

    def _set(self, slot: int, state: SlotState, owner: int = 0) -> None:
        assert self.arena is not None
        self.arena.write_header(slot, SlotHeader(state, self._generations[slot], owner=owner))

    async def Commit(self, request: pb.CommitRequest, context: object) -> pb.CommitResponse:
        await self._begin("Commit")
        self._check(request.owner)
        results = [self._commit(request.owner, f) for f in request.filled]
        return pb.CommitResponse(
            results=results,
            slots=self._grant(request.owner, request.grant),
            incarnation=self.incarnation,
        )

    def _commit(self, owner: int, filled: pb.Filled) -> pb.CommitResult:
        assert self.arena is not None
        slot, generation = filled.slot.index, filled.slot.generation
        known = self.blocks.get(filled.key)
        if known is not None and (known.slot, known.generation) == (slot, generation):
            return pb.COMMIT_RESULT_STORED
        if self.granted[owner].get(slot) != generation:
            return pb.COMMIT_RESULT_FENCED
        del self.granted[owner][slot]
        if not filled.key or known is not None:
            self._set(slot, SlotState.FREE)
            self._free.append(slot)
            return pb.COMMIT_RESULT_DUPLICATE if filled.key else pb.COMMIT_RESULT_RETURNED
        self.committed.append(filled)
        self.arena.write_header(
            slot,
            SlotHeader(
                SlotState.SEALED,
                generation,
                key=filled.key,
                parent=filled.parent or NO_KEY,
                position=filled.position,
                created_ms=int(time.time() * 1000),
                payload_bytes=self.arena.geometry.payload_bytes,
                checksums=(filled.checksum,),
            ),
        )
        self.blocks[filled.key] = Stored(filled.key, slot, generation, filled.checksum)
        return pb.COMMIT_RESULT_STORED

    async def Lookup(self, request: pb.LookupRequest, context: object) -> pb.LookupResponse:
        await self._begin("Lookup")
        self.lookups.append(request)
        stored = 0
        while stored < len(request.keys) and request.keys[stored] in self.blocks:
            stored += 1
        answer = pb.LookupResponse(
            first_block=request.skip_blocks, stored_blocks=stored, incarnation=self.incarnation
        )
        keys = list(request.keys[request.skip_blocks : stored])
        if keys:
            answer.lease = secrets.randbits(63) | 1
            answer.expires_ms = 60_000
            self.leases[answer.lease] = (keys, request.skip_blocks)
            answer.ready.extend(self._ready(keys))
            answer.promoting = len(keys) - len(answer.ready)
        return answer

    def _ready(self, keys: list[bytes]) -> list[pb.LeasedBlock]:
        ready = []
        for key in keys:
            block = self.blocks.get(key)
            if block is None or block.hidden:
                break
            slot = pb.Slot(index=block.slot, generation=block.generation)
            ready.append(pb.LeasedBlock(slot=slot, checksums=[block.checksum]))
        return ready

    def promote(self) -> None:
        """Everything is in G2 now."""
        for block in self.blocks.values():
            block.hidden = False
        self._promoted.set()

    async def Await(self, request: pb.AwaitRequest, context: object) -> pb.AwaitResponse:
        await self._begin("Await")
        if request.lease not in self.leases:
            raise NotFound("no such lease", reason="LEASE_UNKNOWN")
        keys, _ = self.leases[request.lease]
        try:
            async with asyncio.timeout(request.wait_ms / 1000):
                while len(self._ready(keys)) < len(keys):
                    self._promoted.clear()
                    await self._promoted.wait()
        except TimeoutError:
            self.calls["Await timeouts"] += 1
        ready = self._ready(keys)
        return pb.AwaitResponse(
            ready=ready, promoting=len(keys) - len(ready), incarnation=self.incarnation
        )

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:
        await self._begin("Release")
        released = 0
        for report in request.leases:
            if self.leases.pop(report.lease, None) is not None:
                released += 1
                self.reports.append(report)
        return pb.ReleaseResponse(released=released)

    async def Stats(self, request: pb.StatsRequest, context: object) -> pb.StatsResponse:
        await self._begin("Stats")
        return pb.StatsResponse(node=self.node, incarnation=self.incarnation)

    def flip(self, key: bytes, at: int = 100) -> None:
        """Damages one byte of a block."""
        assert self.arena is not None
        payload = self.arena.payload(self.blocks[key].slot)
        payload[at] ^= 0x40


@asynccontextmanager
async def serve_kvbm(fake: FakeKvbm, port: int = 0) -> AsyncIterator[RpcServer]:
    """Serves it on a port of this machine."""
    service = Service(
        "forebay.kvbm.v1.KvbmService", kvbm_pb2_grpc.add_KvbmServiceServicer_to_server, fake
    )
    async with rpc_server("127.0.0.1", port, [service], grace_s=0.1) as server:
        await server.set_serving(True)
        yield server
