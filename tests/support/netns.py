"""Two network namespaces with a link between them that can be cut, and made slow.

Each is a host to its processes: an address and a loopback of its own. For tests and benchmarks;
needs root. By a second network, of control, all three reach each other whatever becomes of the
link; `Host.env` keeps UCX off it.
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
    """Its end of the link."""
    address: str
    """By the link."""
    control: str
    """By the network of control."""

    def argv(self, argv: Sequence[str]) -> list[str]:
        """A command, run there. Its /sys is that of the namespace, which UCX looks at."""
        return [shutil.which("ip") or IP, "netns", "exec", self.namespace, *argv]

    @property
    def env(self) -> dict[str, str]:
        """What keeps UCX to the link: else it would copy within the machine, past it."""
        return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": self.device}

    def received_bytes(self) -> int:
        """Bytes that came over the link so far."""
        path = f"/sys/class/net/{self.device}/statistics/rx_bytes"
        return int(_run(*self.argv(["cat", path])))


@dataclass(frozen=True)
class Link:
    """Two hosts, and what is between them."""

    a: Host
    b: Host
    control: str
    """This machine's address in the network of control."""

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
    """Made, and removed at the end. Skips a test where that can't be."""
    if os.geteuid() or not os.access(IP, os.X_OK) or not os.access(TC, os.X_OK):
        pytest.skip("needs root, ip and tc")
    name, net = f"fb{secrets.token_hex(3)}", secrets.randbelow(200) + 20
    # What a bridge of this machine passes on, its firewall decides; so it has a namespace, too.
    hub = f"{name}h"
    a, b = (
        Host(f"{name}{side}", f"{name}{side}", f"10.213.{net}.{n}", f"10.214.{net}.{n}")
        for n, side in ((1, "a"), (2, "b"))
    )
    link = Link(a, b, f"10.214.{net}.254")
    if subprocess.run([IP, "netns", "add", hub], capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    try:
        for host in (a, b):
            _run(IP, "netns", "add", host.namespace)
        _run(IP, "-n", hub, "link", "add", "bridge", "type", "bridge")
        _run(IP, "-n", hub, "link", "set", "bridge", "up")
        _cable(hub, "mine", [], f"{name}c")
        _run(IP, "addr", "add", f"{link.control}/24", "dev", f"{name}c")
        _run(IP, "link", "set", f"{name}c", "up")
        veth = ("type", "veth", "peer", "name", b.device, "netns", b.namespace)
        _run(IP, "-n", a.namespace, "link", "add", a.device, *veth)
        for host in (a, b):
            inside = ["-n", host.namespace]
            _cable(hub, host.device, inside, "control")
            for device, address in ((host.device, host.address), ("control", host.control)):
                _run(IP, *inside, "addr", "add", f"{address}/24", "dev", device)
                _run(IP, *inside, "link", "set", device, "up")
            _run(IP, *inside, "link", "set", "lo", "up")
        yield link
    finally:
        # With a namespace go its devices, and their other ends.
        for namespace in (hub, a.namespace, b.namespace):
            _run(IP, "netns", "del", namespace, check=False)


def _cable(hub: str, port: str, inside: Sequence[str], device: str) -> None:
    """Makes `device` inside a namespace, plugged into a port of the hub's bridge."""
    _run(IP, *inside, "link", "add", device, "type", "veth", "peer", "name", port, "netns", hub)
    _run(IP, "-n", hub, "link", "set", port, "master", "bridge")
    _run(IP, "-n", hub, "link", "set", port, "up")
