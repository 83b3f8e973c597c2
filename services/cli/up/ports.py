"""Ports: is one free, who holds it, and how to find free ones.

Free ports are drawn from below the kernel's ephemeral range, so that no outgoing connection takes
one between the draw and the bind.
"""

import contextlib
import os
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from services.cli.errors import PortTaken
from services.cli.up.process import command_line

_LISTEN = "0A"
_LOWEST = 15_000


@dataclass(frozen=True, slots=True)
class PortUse:
    """A port that the cluster wants: what for, and the flag that moves it."""

    port: int
    purpose: str
    flag: str
    host: str = "127.0.0.1"


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on host:port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections that linger from an earlier life of the port don't count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def listening_inodes(table: str, port: int) -> set[str]:
    """Inodes of the sockets that listen on `port`, from the text of /proc/net/tcp or tcp6."""
    found: set[str] = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != _LISTEN:
            continue
        if int(fields[1].rpartition(":")[2], 16) == port:
            found.add(fields[9])
    return found


def holder(port: int) -> str:
    """Who listens on `port`, for people ("pid 12, nginx: master"); empty when it can't be told."""
    inodes: set[str] = set()
    for name in ("tcp", "tcp6"):
        try:
            inodes |= listening_inodes(Path(f"/proc/net/{name}").read_text(), port)
        except OSError:
            continue
    wanted = {f"socket:[{inode}]" for inode in inodes}
    if not wanted:
        return ""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        if not wanted.isdisjoint(_links(folder / "fd")):
            command = command_line(int(folder.name))
            return f"pid {folder.name}, {command[:120] or 'unknown command'}"
    return "a process of another user"


def _links(folder: Path) -> set[str]:
    """What the open files of a process are; those that can't be read (any more) are left out."""
    found: set[str] = set()
    try:
        files = list(folder.iterdir())
    except OSError:  # it ended, or belongs to another user
        return found
    for file in files:
        with contextlib.suppress(OSError):
            found.add(os.readlink(file))
    return found


def check_free(uses: Iterable[PortUse]) -> None:
    """Raises PortTaken that names each port that is taken, its holder, and the flag to change."""
    taken = [use for use in uses if not is_free(use.port, use.host)]
    if not taken:
        return
    lines = []
    for use in taken:
        who = holder(use.port)
        held = f", held by {who}" if who else ""
        lines.append(f"port {use.port} ({use.purpose}, {use.flag}) is taken{held}")
    flags = " or ".join(dict.fromkeys(use.flag for use in taken))
    ours = any("services.gateway" in line or "services.router" in line for line in lines)
    stop = " If that is an older cluster of yours: forebay down." if ours else ""
    raise PortTaken(
        "\n".join(lines),
        hint=f"Choose others with {flags}, or let --auto-ports find free ones.{stop}",
    )


def free_port(host: str = "127.0.0.1", *, rng: random.Random | None = None) -> int:
    """A port on which nothing listens and that the kernel won't hand to outgoing connections."""
    rng = rng or random.Random()
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first = 32_768
    low, high = (_LOWEST, first - 1) if first > _LOWEST + 2_000 else (20_000, 60_999)
    for _ in range(1_000):
        port = rng.randint(low, high)
        if is_free(port, host):
            return port
    raise PortTaken(f"no free port between {low} and {high} on {host}")
