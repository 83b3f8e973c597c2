"""The gRPC server every service runs: health, reflection, keepalive, limits, error mapping.

Servicers hold async methods (async generators for streamed answers) and raise ForebayError.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from services.common.errors import Unavailable
from services.common.net import host_port
from services.common.rpc.errors import ErrorInterceptor

MAX_MESSAGE_BYTES = 64 << 20
"""A 1 M-token prompt is 4 to 5 MB as packed varints, a snapshot of 1 M blocks 8 MB."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True)
class Service:
    """One service of a server: full name, generated `add_..._to_server`, and the servicer."""

    name: str
    add: Callable[[Any, Any], None]
    servicer: Any


class RpcServer:
    """A running server. `port` is the bound one."""

    def __init__(self, port: int, names: Sequence[str], health: health_aio.HealthServicer) -> None:
        self.port = port
        self._names = names
        self._health = health

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of the server ("") and of each of its services."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._names):
            await self._health.set(name, status)


@asynccontextmanager
async def rpc_server(
    host: str, port: int, services: Sequence[Service], *, grace_s: float = 1.0, socket: str = ""
) -> AsyncIterator[RpcServer]:
    """Serves `services` on host:port (0 picks a free port), NOT_SERVING until told otherwise.

    `socket` is the path of a Unix socket to serve on as well. At the end it closes both and gives
    running calls `grace_s` seconds. Raises Unavailable (PORT_TAKEN) when one can't be had.
    """
    server = grpc.aio.server(interceptors=(ErrorInterceptor(),), options=SERVER_OPTIONS)
    for service in services:
        service.add(service.servicer, server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = [s.name for s in services]
    reflection.enable_server_reflection(
        (
            *names,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        ),
        server,
    )
    try:
        bound = server.add_insecure_port(host_port(host, port))
    except RuntimeError as exc:
        raise Unavailable(
            f"gRPC port {host_port(host, port)} can't be opened; is another process using it?",
            reason="PORT_TAKEN",
        ) from exc
    if socket:
        try:
            server.add_insecure_port(f"unix:{socket}")
        except RuntimeError as exc:
            raise Unavailable(f"Unix socket {socket} can't be opened", reason="PORT_TAKEN") from exc
    running = RpcServer(bound, names, health)
    await running.set_serving(False)
    await server.start()
    try:
        yield running
    finally:
        await health.enter_graceful_shutdown()
        await server.stop(grace_s)
