"""NIXL's object backend, in a helper process that can be killed (helper.py).

It has only staging buffers in common with the daemon.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from services.kvbm.movers.helper import Helper
from services.kvbm.movers.staging import Buffer

if TYPE_CHECKING:
    from services.kvbm.movers.s3 import S3Place

Way = Literal["READ", "WRITE"]
_END_S = 5.0


class NixlCourier:
    """The helper. Loop's thread only."""

    def __init__(self) -> None:
        self._helper = Helper("nixl_helper.py")
        self._mapped: set[int] = set()

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._helper.alive

    @property
    def gone(self) -> bool:
        """Whether its process has ended."""
        return self._helper.gone

    @property
    def pid(self) -> int:
        """Of its process; 0 before the start."""
        return self._helper.pid

    async def start(self, place: S3Place) -> None:
        """Starts the process and its agent. Raises NixlFailed."""
        self._helper.start({})
        scheme, _, host = place.endpoint.rpartition("://")
        parameters = {
            "access_key": place.access_key,
            "secret_key": place.secret_key,
            "bucket": place.bucket,
            "region": place.region,
            "endpoint_override": host,
            "scheme": scheme or "https",
            "use_virtual_addressing": "false",
            "req_checksum": "required",
            "num_threads": "4",
        }
        await self._helper.ask({"open": {k: v for k, v in parameters.items() if v}})

    async def move(self, way: Way, buffer: Buffer, length: int, key: str) -> None:
        """Moves an object. Raises NixlFailed; when cancelled, the helper is killed."""
        fds: list[int] = []
        request: dict[str, object] = {"way": way, "buffer": buffer.id, "length": length, "key": key}
        if buffer.id not in self._mapped:
            self._mapped.add(buffer.id)
            request["capacity"] = buffer.capacity
            fds = [buffer.fd]
        try:
            await self._helper.ask(request, fds)
        except asyncio.CancelledError:
            # A transfer that nobody waits for any more would go on for as long as it likes.
            self.kill()
            raise

    def forget(self, buffer: Buffer) -> None:
        """The buffer is given up, and isn't in any move."""
        if buffer.id in self._mapped:
            self._mapped.discard(buffer.id)
            self._helper.tell({"unmap": buffer.id})

    def kill(self) -> None:
        """Ends the process, and with it whatever it was doing."""
        self._helper.kill()

    async def end(self) -> None:
        """Ends it and waits for that, a few seconds at most."""
        await self._helper.end(_END_S)
