"""Writing to a stream: what grpc.aio's `write` lacks."""

import asyncio
from typing import Any


class StreamEnded(ConnectionError):
    """The call is over, or as good as over: a message could not be written."""


async def send(call: Any, message: Any, *, timeout_s: float | None = None) -> None:
    """Writes `message` to the stream `call`. One task at a time: concurrent writes hang.

    Raises StreamEnded when the call had ended before, and when `timeout_s` passes (a first `write`
    never returns if the connection breaks while the call is made); grpc.RpcError when it ends
    meanwhile.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await call.write(message)
    except asyncio.InvalidStateError as exc:
        raise StreamEnded(await call.details() or (await call.code()).name) from exc
    except TimeoutError as exc:
        raise StreamEnded(f"a message could not be written in {timeout_s} s") from exc
