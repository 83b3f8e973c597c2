"""What both kinds of streams share: waiting for a connection, and the reason why a stream ended."""

import asyncio
from typing import Any

import grpc

from services.common.rpc.errors import translate
from services.common.rpc.stream import StreamEnded


class Unreachable(Exception):
    """There is no connection. `refused`: nobody listens there; else it broke or took long."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


async def connected(channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
    """Returns when the channel is connected.

    Raises Unreachable at once when nobody listens, else after `timeout_s`: a failed attempt may
    mean a busy machine or a stopped process, and neither is gone.
    """
    state = channel.get_state(try_to_connect=True)
    try:
        async with asyncio.timeout(timeout_s):
            while state is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.SHUTDOWN:
                    raise Unreachable(f"the channel to {address} was closed")
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and await _refuses(address):
                    raise Unreachable(f"nobody listens at {address}", refused=True)
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        raise Unreachable(f"no connection to {address} within {timeout_s:g} s") from None


async def _refuses(address: str) -> bool:
    """Whether a plain connection is refused."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    writer.close()
    return False


def why_ended(group: BaseExceptionGroup[Any], *expected: type[Exception]) -> str:
    """Why a stream's tasks ended. Raises the group again when it holds something unexpected."""
    known: tuple[type[Exception], ...] = (grpc.RpcError, StreamEnded, *expected)
    _, rest = group.split(known)
    if rest is not None:
        raise group
    exc: BaseException = group
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    if isinstance(exc, grpc.RpcError):
        error = translate(exc)
        return f"{error.reason}: {error.message}"
    return str(exc)
