"""What lies between a stream's reader and its writer: questions, and answers that come late."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from forebay.router.v1 import router_pb2 as pb

from services.common.errors import ForebayError
from services.router.adapters.messages import waiting_message
from services.router.core.answers import Query

_MOST_WAITING = 1024
"""Messages of one gateway read ahead; beyond that its stream waits until some are answered."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A message of a gateway, ready to be decided."""

    message: pb.RouteStreamRequest
    query: Query | ForebayError | None


class Inbox:
    """Messages between a stream's reader and its writer; bounded: a full one stops the reader."""

    def __init__(self) -> None:
        self._items: deque[Asked] = deque()
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False
        self._ended = False
        self._ready: deque[pb.RouteStreamResponse] = deque()
        self.waiting: dict[int, int] = {}
        """Numbers of those that wait for room, by correlation id."""

    async def put(self, item: Asked) -> None:
        """Adds a message as soon as there is room."""
        while len(self._items) >= _MOST_WAITING:
            self._room.clear()
            await self._room.wait()
        self._items.append(item)
        self._more.set()

    def close(self) -> None:
        """No more messages come; what is there can still be taken, and late answers."""
        self._closed = True
        self._more.set()

    def end(self) -> None:
        """Nothing more is waited for, late answers neither."""
        self._ended = True
        self.close()

    def unsent(self) -> list[str]:
        """Attempt ids of placements that came late, and that nobody took."""
        placements = [m.placement for m in self._ready if m.HasField("placement")]
        ids = [id for p in placements for id in (p.attempt_id, p.prefill_attempt_id)]
        return [id for id in ids if id]

    def answer(self, message: pb.RouteStreamResponse) -> None:
        """An answer that comes late. Not more than wait can be there."""
        self._ready.append(message)
        self._more.set()

    def sign(self) -> None:
        """Shows the gateway that we live, if it hears nothing else and something waits."""
        if self.waiting and not self._ready:
            self._ready.append(waiting_message(next(iter(self.waiting)), 0.0, 0.0))
            self._more.set()

    async def take(self) -> tuple[list[Asked], list[pb.RouteStreamResponse]]:
        """All that has arrived, and late answers; none at all means that it is over."""
        while not self._items and not self._ready and not self._over:
            self._more.clear()
            await self._more.wait()
        items, ready = list(self._items), list(self._ready)
        self._items.clear()
        self._ready.clear()
        self._room.set()
        return items, ready

    @property
    def _over(self) -> bool:
        return self._ended or (self._closed and not self.waiting)
