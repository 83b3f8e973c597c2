"""The gRPC channel every client uses: keepalive, limits, quick reconnects, trace context."""

import grpc

from services.common.rpc.server import MAX_MESSAGE_BYTES
from services.common.telemetry.tracing import inject

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In truth the time limit of one attempt to connect: a busy machine or TLS may need it.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
    # Channels to one address must not share a connection: a stuck one would take the others along.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to host:port (or unix:path). Close it, or use it as an async context manager."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """The current trace context as call metadata."""
    return tuple(inject().items())
