"""KV events of an engine in another process: vLLM's own ZMQ stream, without gaps.

A missed batch is fetched from vLLM's replay socket; if it is no longer there, everything known of
the rank is dropped, since a block listed in error costs more than one that is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import KVEventBatch

from services.common.telemetry.logging import get_logger
from services.worker.core.blocks import AllDropped, BlockChange
from services.worker.engines.vllm.translate import block_changes

REPLAY_TIMEOUT_S = 5.0
_END = b"\xff" * 8
log = get_logger(__name__)


class KvFeed:
    """One rank's events, in order, to `deliver`."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        block_size: int,
        dp_rank: int,
        deliver: Callable[[list[BlockChange]], None],
    ) -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._block_size = block_size
        self._dp_rank = dp_rank
        self._deliver = deliver
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._next = 0
        self.gaps = 0
        self.lost = 0

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Follows the stream until cancelled."""
        with context.socket(zmq.SUB) as stream:
            stream.setsockopt(zmq.RCVHWM, 0)
            stream.setsockopt(zmq.SUBSCRIBE, b"")
            stream.connect(self._endpoint)
            # What was published before the subscription took hold.
            await self._catch_up(context)
            while True:
                _, number, payload = await stream.recv_multipart()
                sequence = int.from_bytes(number, "big")
                if sequence > self._next:
                    self.gaps += 1
                    await self._catch_up(context)
                if sequence > self._next:
                    self._lose(sequence)
                if sequence == self._next:
                    self._take(sequence, payload)

    async def _catch_up(self, context: zmq.asyncio.Context) -> None:
        with context.socket(zmq.DEALER) as replay:
            replay.setsockopt(zmq.LINGER, 0)
            replay.connect(self._replay_endpoint)
            await replay.send_multipart([b"", self._next.to_bytes(8, "big")])
            try:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    while True:
                        _, _, number, payload = await replay.recv_multipart()
                        if number == _END:
                            return
                        sequence = int.from_bytes(number, "big")
                        if sequence > self._next:
                            self._lose(sequence)
                        if sequence == self._next:
                            self._take(sequence, payload)
            except TimeoutError:
                log.warning("the engine's replay socket does not answer", dp_rank=self._dp_rank)

    def _lose(self, sequence: int) -> None:
        self.lost += 1
        log.warning(
            "KV events are lost for good; blocks are forgotten",
            dp_rank=self._dp_rank,
            expected=self._next,
            got=sequence,
        )
        self._next = sequence
        self._deliver([AllDropped(self._dp_rank)])

    def _take(self, sequence: int, payload: bytes) -> None:
        self._next = sequence + 1
        events = self._decode(payload).events
        changes = block_changes(events, self._block_size, self._dp_rank)
        if changes:
            self._deliver(changes)
