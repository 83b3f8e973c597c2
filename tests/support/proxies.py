"""Proxies between a worker and everyone else, each a thread: TCP for gRPC, ZMQ for events.

A worker that listens on 127.0.0.2 and advertises 127.0.0.1 is reached through them without knowing
it: the proxy listens on 127.0.0.1 at the same ports. So a test can lose single event messages, or
cut a link without killing anyone.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

HIDDEN_HOST = "127.0.0.2"
"""Where the worker really listens."""
SHOWN_HOST = "127.0.0.1"
"""Where the others think that it does."""


class EventProxy:
    """Passes event messages on, all but those that `drop` picks."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.XPUB)
        self._out.setsockopt(zmq.LINGER, 0)
        self.port = self._out.bind_to_random_port(f"tcp://{SHOWN_HOST}")
        self._in = self._context.socket(zmq.XSUB)
        self._in.setsockopt(zmq.LINGER, 0)
        self._in.setsockopt(zmq.RECONNECT_IVL, 50)
        self._in.connect(f"tcp://{HIDDEN_HOST}:{self.port}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event-proxy")
        self.drop: Callable[[bytes], bool] = lambda envelope: False
        """Whether to lose this envelope (serialized). Called in the proxy's thread."""
        self.dropped = 0
        self.passed = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self._in.close()
        self._out.close()
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._in, zmq.POLLIN)
        poller.register(self._out, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(50))
            if self._out in ready:  # subscriptions travel the other way
                self._in.send_multipart(self._out.recv_multipart())
            if self._in in ready:
                frames = self._in.recv_multipart()
                if self.drop(frames[-1]):
                    self.dropped += 1
                else:
                    self.passed += 1
                    self._out.send_multipart(frames)


class TcpProxy:
    """Passes bytes both ways between SHOWN_HOST and HIDDEN_HOST, one port."""

    def __init__(self) -> None:
        self._listener = socket.create_server((SHOWN_HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="tcp-proxy")
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        self._listener.setblocking(False)
        accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()
        for task in (accepting, *self._tasks):
            task.cancel()
        self._loop.run_until_complete(
            asyncio.gather(accepting, *self._tasks, return_exceptions=True)
        )
        self._listener.close()
        self._loop.close()

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            task = self._loop.create_task(self._serve(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        upstream = socket.socket()
        with client, upstream:
            upstream.setblocking(False)
            for end in (client, upstream):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                await self._loop.sock_connect(upstream, (HIDDEN_HOST, self.port))
                pumps = [
                    self._loop.create_task(self._pump(client, upstream)),
                    self._loop.create_task(self._pump(upstream, client)),
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            except OSError:
                return  # nobody behind us: closing is what a refusal looks like from outside

    async def _pump(self, source: socket.socket, target: socket.socket) -> None:
        while data := await self._loop.sock_recv(source, 65536):
            await self._loop.sock_sendall(target, data)


@contextmanager
def worker_proxies() -> Iterator[tuple[TcpProxy, EventProxy]]:
    """Both proxies, running; hand `proxy_flags` to the worker's start."""
    tcp, events = TcpProxy(), EventProxy()
    tcp.start()
    events.start()
    try:
        yield tcp, events
    finally:
        tcp.close()
        events.close()


def proxy_flags(tcp: TcpProxy, events: EventProxy) -> dict[str, object]:
    """Flags of a worker that is to be reached through these proxies only."""
    return {
        "host": HIDDEN_HOST,
        "advertise_host": SHOWN_HOST,
        "port": tcp.port,
        "events_port": events.port,
    }
