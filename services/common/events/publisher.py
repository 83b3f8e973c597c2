"""The sending end of an event stream: ZMQ PUB, numbered from 1, with heartbeats.

Nothing here waits for a subscriber. One that is too slow loses messages (beyond SEND_LIMIT
ZMQ drops), sees the hole in the numbers, and takes a snapshot.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import zmq

from services.common.errors import Unavailable
from services.common.events.codec import encode
from services.common.events.model import Batch, Event
from services.common.net import advertised_host, host_port

SEND_LIMIT = 10_000
"""Messages that ZMQ keeps for each subscriber before it drops."""

_BIND_ATTEMPTS = 20
_BIND_PAUSE_S = 0.05


def publisher_time_us() -> int:
    """The clock that stamps envelopes. A snapshot is stamped after its sequence was read."""
    return time.time_ns() // 1000


class EventPublisher:
    """A bound stream; use `open_publisher`. Loop's thread only."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", address: str, publisher_id: str, incarnation: int
    ) -> None:
        self.address = address
        """tcp://host:port that others reach it by."""
        self.sequence = 0
        """The last number given out; 0 before the first."""
        self._socket = socket
        self._publisher = publisher_id
        self._topic = publisher_id.encode()
        self._incarnation = incarnation

    def publish(self, events: Sequence[Event]) -> int:
        """Sends `events` as one batch and returns its number. Never blocks.

        No events: nothing is sent, and the last number is returned.
        """
        if events:
            self.sequence += 1
            self._send(tuple(events))
        return self.sequence

    def heartbeat(self) -> None:
        """Tells the last number, so that silence and a lost last batch show."""
        self._send(())

    def _send(self, events: tuple[Event, ...]) -> None:
        now = publisher_time_us()
        batch = Batch(self._publisher, self._incarnation, self.sequence, now, events)
        # A full PUB socket drops instead of raising Again; the suppression is for a closing one.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart((self._topic, encode(batch)), zmq.NOBLOCK)


@asynccontextmanager
async def open_publisher(
    host: str,
    port: int,
    publisher_id: str,
    incarnation: int,
    *,
    advertise_host: str = "",
    heartbeat_s: float = 0.25,
) -> AsyncIterator[EventPublisher]:
    """Publishes on host:port (0 picks a free port), with a heartbeat every `heartbeat_s`.

    Raises Unavailable (PORT_TAKEN) when the port can't be had.
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    try:
        socket.setsockopt(zmq.SNDHWM, SEND_LIMIT)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        # ZMQ binds to numbers only.
        found = await asyncio.get_running_loop().getaddrinfo(host or "0.0.0.0", port)
        await _bind(socket, host, str(found[0][4][0]), port)
        bound = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        address = f"tcp://{host_port(advertised_host(host, advertise_host), bound)}"
        publisher = EventPublisher(socket, address, publisher_id, incarnation)
        beats = asyncio.create_task(_beat(publisher, heartbeat_s), name="event heartbeats")
        try:
            yield publisher
        finally:
            beats.cancel()
            await asyncio.wait({beats})
    finally:
        socket.close()


async def _bind(socket: "zmq.Socket[bytes]", host: str, address: str, port: int) -> None:
    for attempt in range(_BIND_ATTEMPTS):
        try:
            socket.bind(f"tcp://{host_port(address, port)}")
            return
        except zmq.ZMQError as exc:
            # ZMQ closes sockets in a thread of its own: a former life's may still be there.
            if exc.errno != zmq.EADDRINUSE or attempt == _BIND_ATTEMPTS - 1:
                raise Unavailable(
                    f"events port {host_port(host, port)} can't be opened: {exc.strerror}",
                    reason="PORT_TAKEN",
                ) from exc
        await asyncio.sleep(_BIND_PAUSE_S)


async def _beat(publisher: EventPublisher, heartbeat_s: float) -> None:
    while True:
        publisher.heartbeat()
        await asyncio.sleep(heartbeat_s)
