"""Two network namespaces with a link between them that can be cut, and made slow.

Each is a host to its processes: an address and a loopback of its own. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

IP, TC = "/usr/sbin/ip", "/usr/sbin/tc"


def _run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Host:
    """One side."""

    namespace: str
    device: str
    address: str

    def argv(self, argv: Sequence[str]) -> list[str]:
        """A command, run there. Its /sys is that of the namespace, which UCX looks at."""
        return [shutil.which("ip") or IP, "netns", "exec", self.namespace, *argv]

    def received_bytes(self) -> int:
        """Bytes that came over the link so far."""
        path = f"/sys/class/net/{self.device}/statistics/rx_bytes"
        return int(_run(*self.argv(["cat", path])))


@dataclass(frozen=True)
class Link:
    """Two hosts, and what is between them."""

    a: Host
    b: Host

    def cut(self) -> None:
        """Nothing passes any more."""
        _run(IP, "-n", self.a.namespace, "link", "set", self.a.device, "down")

    def heal(self) -> None:
        """All passes again."""
        _run(IP, "-n", self.a.namespace, "link", "set", self.a.device, "up")

    def slow(self, mbit_s: float) -> None:
        """What a sends passes at that rate."""
        shape = ("tbf", "rate", f"{mbit_s}mbit", "burst", "64kb", "latency", "400ms")
        _run(TC, "-n", self.a.namespace, "qdisc", "replace", "dev", self.a.device, "root", *shape)

    def fast(self) -> None:
        """No limit any more."""
        _run(TC, "-n", self.a.namespace, "qdisc", "del", "dev", self.a.device, "root")


@contextlib.contextmanager
def two_hosts() -> Iterator[Link]:
    """Made, and removed at the end; skips the test where that is not permitted."""
    if os.geteuid() or not os.access(IP, os.X_OK) or not os.access(TC, os.X_OK):
        pytest.skip("needs root, ip and tc")
    name, net = secrets.token_hex(3), secrets.randbelow(200) + 20
    a = Host(f"fb{name}a", f"fb{name}a", f"10.213.{net}.1")
    b = Host(f"fb{name}b", f"fb{name}b", f"10.213.{net}.2")
    if subprocess.run([IP, "netns", "add", a.namespace], capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    try:
        _run(IP, "netns", "add", b.namespace)
        veth = ("type", "veth", "peer", "name", b.device, "netns", b.namespace)
        _run(IP, "link", "add", a.device, "netns", a.namespace, *veth)
        for host in (a, b):
            _run(IP, "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.device)
            _run(IP, "-n", host.namespace, "link", "set", "lo", "up")
            _run(IP, "-n", host.namespace, "link", "set", host.device, "up")
        yield Link(a, b)
    finally:
        for host in (a, b):
            _run(IP, "netns", "del", host.namespace, check=False)
