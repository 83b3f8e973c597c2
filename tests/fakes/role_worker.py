"""A worker that has nothing but a role: real gRPC SetRole and Snapshot, a real event stream, and a
record in discovery that follows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

from forebay.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.cards import (
    Instance,
    InstanceKind,
    ModelCard,
    Role,
    role_from_proto,
    role_to_proto,
)
from services.common.errors import ForebayError
from services.common.events.codec import snapshot_to_proto
from services.common.events.model import Snapshot
from services.common.events.publisher import EventPublisher, open_publisher, publisher_time_us
from services.common.ids import new_incarnation
from services.common.rpc.server import Service, rpc_server


class Record(Protocol):
    """A registration in discovery."""

    async def update(self, instance: Instance) -> None:
        """Changes the record."""


class RoleWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Use `role_worker`."""

    def __init__(self, instance: Instance, publisher: EventPublisher) -> None:
        self.instance = instance
        self.publisher = publisher
        self.record: Record | None = None
        self.calls: list[Role] = []
        """Roles that it was asked to take."""
        self.refusal: ForebayError | None = None
        """What it answers instead."""

    async def SetRole(
        self, request: worker_pb2.SetRoleRequest, context: Any
    ) -> worker_pb2.SetRoleResponse:
        role = role_from_proto(request.role) or Role.BOTH
        self.calls.append(role)
        if self.refusal is not None:
            raise self.refusal
        before, self.instance = self.instance.role, replace(self.instance, role=role)
        if self.record is not None:
            await self.record.update(self.instance)
        return worker_pb2.SetRoleResponse(previous=role_to_proto(before))

    async def Snapshot(
        self, request: worker_pb2.SnapshotRequest, context: Any
    ) -> worker_pb2.SnapshotResponse:
        return snapshot_to_proto(
            Snapshot(
                self.instance.id,
                self.instance.incarnation,
                self.publisher.sequence,
                time_unix_us=publisher_time_us(),
            )
        )


@asynccontextmanager
async def role_worker(
    worker_id: str,
    role: Role,
    registered: Callable[[Instance], AbstractAsyncContextManager[Record]],
    *,
    model: str = "m",
    transfer: str = "nixl",
) -> AsyncIterator[RoleWorker]:
    """A registered worker."""
    incarnation = new_incarnation()
    async with open_publisher("127.0.0.1", 0, worker_id, incarnation, heartbeat_s=0.1) as publisher:
        card = ModelCard(
            model=model, namespace=b"\0" * 32, block_size=16, max_model_len=4096, vocab_size=100
        )
        instance = Instance(
            worker_id,
            InstanceKind.WORKER,
            incarnation,
            "",
            events_address=publisher.address,
            role=role,
            card=card,
            transfer=transfer,
        )
        worker = RoleWorker(instance, publisher)
        service = Service(
            worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
            worker_pb2_grpc.add_WorkerServiceServicer_to_server,
            worker,
        )
        async with rpc_server("127.0.0.1", 0, [service], grace_s=0) as server:
            worker.instance = replace(instance, address=f"127.0.0.1:{server.port}")
            async with registered(worker.instance) as record:
                worker.record = record
                yield worker
