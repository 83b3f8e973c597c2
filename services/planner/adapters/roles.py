"""SetRole at workers."""

from __future__ import annotations

import grpc
from forebay.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.cards import Role, role_from_proto, role_to_proto
from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate


async def set_role(address: str, role: Role, timeout_s: float) -> Role:
    """Gives the worker at `address` a role; its role before.

    Raises the ForebayError that the worker answered, or Unavailable or DeadlineExceeded.
    Idempotent.
    """
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = await stub.SetRole(
                worker_pb2.SetRoleRequest(role=role_to_proto(role)), timeout=timeout_s
            )
        except grpc.RpcError as exc:
            raise translate(exc) from exc
    return role_from_proto(answer.previous) or Role.BOTH
