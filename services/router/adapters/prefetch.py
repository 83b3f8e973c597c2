"""Hints to kvbm daemons: bring up what a placed request will want. Fire and forget.

A hint is worth something only while its request is on its way: queues are short, what does not fit
is dropped and counted, and a call has a short deadline. Decisions never wait for any of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from forebay.kvbm.v1 import kvbm_pb2, kvbm_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.telemetry.logging import get_logger
from services.router.core.answers import Prefetch

log = get_logger(__name__)

_MOST_WAITING = 64
"""Hints that wait for one daemon; one is under way."""
_DEADLINE_S = 1.0
_MOST_KEYS = 65_536
"""Blocks of one hint: what a daemon takes in one call."""
_IDLE_S = 60.0
"""After so long without a hint a daemon's channel is closed."""


class Prefetcher:
    """Sends hints, one at a time to each daemon. Use as an async context manager.

    `address` gives a daemon's gRPC address, empty if it is not known; `on_result` is told "sent",
    "failed" or "dropped" for each hint.
    """

    def __init__(self, address: Callable[[str], str], on_result: Callable[[str], None]) -> None:
        self._address = address
        self._on_result = on_result
        self._senders: dict[str, tuple[asyncio.Queue[Prefetch], asyncio.Task[None]]] = {}

    async def __aenter__(self) -> Prefetcher:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for _, task in self._senders.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def hint(self, prefetch: Prefetch) -> None:
        """Queues a hint; never waits."""
        address = self._address(prefetch.node)
        if not address:
            self._on_result("dropped")
            return
        known = self._senders.get(address)
        if known is None:
            queue: asyncio.Queue[Prefetch] = asyncio.Queue(_MOST_WAITING)
            task = asyncio.create_task(self._send(address, queue), name=f"prefetch {address}")
            self._senders[address] = queue, task
        else:
            queue, _ = known
        try:
            queue.put_nowait(prefetch)
        except asyncio.QueueFull:
            self._on_result("dropped")

    async def _send(self, address: str, queue: asyncio.Queue[Prefetch]) -> None:
        try:
            async with open_channel(address) as channel:
                stub = kvbm_pb2_grpc.KvbmServiceStub(channel)
                while True:
                    try:
                        async with asyncio.timeout(_IDLE_S):
                            hint = await queue.get()
                    except TimeoutError:
                        return
                    request = kvbm_pb2.PrefetchRequest(
                        namespace=hint.namespace,
                        short_keys=hint.keys[:_MOST_KEYS],
                        peers=[
                            kvbm_pb2.PeerHint(node=p.node, first_block=p.first, blocks=p.count)
                            for p in hint.peers
                        ],
                        recompute_block_s=hint.recompute_block_s,
                    )
                    try:
                        await stub.Prefetch(request, timeout=_DEADLINE_S)
                    except grpc.RpcError as exc:
                        log.debug("hint failed", address=address, why=str(exc.code()))
                        self._on_result("failed")
                    else:
                        self._on_result("sent")
        except Exception:
            # Boundary of a task: the next hint starts another.
            log.exception("sending hints broke", address=address)
        finally:
            for _ in range(queue.qsize()):
                self._on_result("dropped")
            del self._senders[address]
