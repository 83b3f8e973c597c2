"""A worker without an engine: real gRPC Snapshot, real event stream, and a cache that tests fill.

Its heartbeats can be stopped, its batches lost, its snapshots held back or refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from forebay.common.v1 import common_pb2
from forebay.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.cards import Adapter, Instance, InstanceKind, ModelCard, Role
from services.common.errors import Overloaded
from services.common.events.codec import snapshot_to_proto
from services.common.events.model import (
    BlocksCleared,
    BlocksDigest,
    BlocksRemoved,
    BlocksStored,
    Event,
    LoadReport,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    RunningRequest,
    Snapshot,
    Tier,
    TierBlocks,
    TransferEnded,
)
from services.common.events.publisher import EventPublisher, open_publisher, publisher_time_us
from services.common.ids import AttemptId, BlockKey, new_incarnation
from services.common.rpc.server import Service, rpc_server


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """`async with fake_worker("w0") as worker:`. Keys are plain ints."""

    def __init__(self, instance: Instance, publisher: EventPublisher) -> None:
        self.instance = instance
        self.blocks: set[int] = set()
        """The truth."""
        self.requests: dict[str, tuple[RequestAdmitted, bool]] = {}
        self.load: LoadReport | None = None
        self.snapshots = 0
        """Snapshots given."""
        self.refusing = False
        """Answer snapshots with RESOURCE_EXHAUSTED."""
        self.beating = True
        """Send heartbeats."""
        self.gate = asyncio.Event()
        """Snapshots wait for it; set at first."""
        self.gate.set()
        self.publisher = publisher
        self._losing = 0

    @property
    def id(self) -> str:
        return self.instance.id

    @property
    def address(self) -> str:
        return self.instance.address

    # What the engine would do.

    def store(self, keys: Iterable[int], tier: Tier = Tier.G1) -> None:
        """Blocks become usable."""
        keys = list(keys)
        if tier is Tier.G1:
            self.blocks.update(keys)
        self._publish(BlocksStored(tier, _keys(keys)))

    def remove(self, keys: Iterable[int]) -> None:
        """Blocks are evicted."""
        keys = list(keys)
        self.blocks.difference_update(keys)
        self._publish(BlocksRemoved(Tier.G1, _keys(keys)))

    def clear(self) -> None:
        """The cache is reset."""
        self.blocks.clear()
        self._publish(BlocksCleared(Tier.G1))

    def admit(
        self,
        attempt_id: str,
        prompt_tokens: int,
        keys: Sequence[int],
        max_new_tokens: int = 1,
        transfer_tokens: int = 0,
        prefill_only: bool = False,
    ) -> None:
        """A request is taken."""
        event = RequestAdmitted(
            AttemptId(attempt_id),
            prompt_tokens,
            max_new_tokens,
            _keys(keys),
            transfer_tokens=transfer_tokens,
            prefill_only=prefill_only,
        )
        self.requests[attempt_id] = event, False
        self._publish(event)

    def first_token(self, attempt_id: str, cached_tokens: int, transferred_tokens: int = 0) -> None:
        """A request's prefill is over."""
        self.requests[attempt_id] = self.requests[attempt_id][0], True
        self._publish(
            RequestFirstToken(
                AttemptId(attempt_id), cached_tokens, transferred_tokens=transferred_tokens
            )
        )

    def transfer(self, attempt_id: str, source: str, tokens: int, seconds: float) -> None:
        """KV came from another worker; 0 tokens: it did not."""
        self._publish(TransferEnded(AttemptId(attempt_id), source, tokens, tokens * 1000, seconds))

    def finish(self, attempt_id: str, cached_tokens: int, output_tokens: int = 1) -> None:
        """A request ends."""
        del self.requests[attempt_id]
        self._publish(RequestFinished(AttemptId(attempt_id), cached_tokens, output_tokens))

    def serve(self, attempt_id: str, prompt_tokens: int, keys: Sequence[int]) -> int:
        """A whole request at once, as an engine would; its cached tokens."""
        size = self.instance.card.block_size if self.instance.card else 1
        hits = 0
        for key in keys[: (prompt_tokens - 1) // size]:
            if key not in self.blocks:
                break
            hits += 1
        self.admit(attempt_id, prompt_tokens, keys)
        self.store(k for k in keys if k not in self.blocks)
        self.first_token(attempt_id, hits * size)
        self.finish(attempt_id, hits * size)
        return hits * size

    def report(self, load: LoadReport) -> None:
        """A load report."""
        self.load = load
        self._publish(load)

    def lose(self, batches: int = 1) -> None:
        """The next batches get their numbers but are never sent."""
        self._losing = batches

    def keep_quiet(self, keys: Iterable[int]) -> None:
        """Blocks become usable, and no event and no number of the stream tells."""
        self.blocks.update(keys)

    def tell_digest(self) -> None:
        """What it holds, condensed."""
        self._publish(BlocksDigest(Tier.G1, *self.digest()))

    def digest(self) -> tuple[int, int]:
        """Count and xor of the truth."""
        xor = 0
        for key in self.blocks:
            xor ^= key
        return len(self.blocks), xor

    def _publish(self, event: Event) -> None:
        if self._losing:
            self._losing -= 1
            self.publisher.sequence += 1
        else:
            self.publisher.publish((event,))

    # What routers ask.

    async def Snapshot(
        self, request: worker_pb2.SnapshotRequest, context: Any
    ) -> worker_pb2.SnapshotResponse:
        await self.gate.wait()
        if self.refusing:
            raise Overloaded("too many snapshots at once")
        self.snapshots += 1
        return snapshot_to_proto(
            Snapshot(
                self.id,
                self.instance.incarnation,
                self.publisher.sequence,
                (TierBlocks(Tier.G1, _keys(self.blocks)),),
                tuple(RunningRequest(event, done) for event, done in self.requests.values()),
                self.load,
                time_unix_us=publisher_time_us(),
            )
        )

    async def GetModelCard(
        self, request: worker_pb2.GetModelCardRequest, context: Any
    ) -> worker_pb2.GetModelCardResponse:
        card = self.instance.card
        return worker_pb2.GetModelCardResponse(
            card=card.to_proto() if card else None,
            worker=common_pb2.Holder(id=self.id, incarnation=self.instance.incarnation),
        )


@asynccontextmanager
async def fake_worker(
    worker_id: str,
    *,
    model: str = "m",
    block_size: int = 16,
    total_blocks: int = 4096,
    max_model_len: int = 100_000,
    adapters: Sequence[Adapter] = (),
    labels: dict[str, str] | None = None,
    kvbm: str = "",
    role: Role = Role.BOTH,
    transfer: str = "",
    port: int = 0,
    events_port: int = 0,
    heartbeat_s: float = 0.1,
) -> AsyncIterator[FakeWorker]:
    """A worker that serves; it is in discovery only if the test puts `instance` there."""
    incarnation = new_incarnation()
    async with open_publisher(
        "127.0.0.1", events_port, worker_id, incarnation, heartbeat_s=3600
    ) as publisher:
        card = ModelCard(
            model=model,
            namespace=b"\0" * 32,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=50_000,
            adapters=tuple(adapters),
            engine="fake",
            total_blocks=total_blocks,
        )
        worker = FakeWorker(
            Instance(worker_id, InstanceKind.WORKER, incarnation, "", card=card), publisher
        )
        service = Service(
            worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
            worker_pb2_grpc.add_WorkerServiceServicer_to_server,
            worker,
        )
        async with rpc_server("127.0.0.1", port, [service], grace_s=0) as server:
            worker.instance = Instance(
                worker_id,
                InstanceKind.WORKER,
                incarnation,
                f"127.0.0.1:{server.port}",
                events_address=publisher.address,
                card=card,
                labels=labels or {},
                kvbm=kvbm,
                role=role,
                transfer=transfer,
            )
            await server.set_serving(True)
            beats = asyncio.create_task(_beat(worker, heartbeat_s))
            try:
                yield worker
            finally:
                worker.gate.set()
                beats.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await beats


async def _beat(worker: FakeWorker, heartbeat_s: float) -> None:
    while True:
        if worker.beating:
            worker.publisher.heartbeat()
        await asyncio.sleep(heartbeat_s)


def _keys(keys: Iterable[int]) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(k) for k in keys)
