"""Host and port as text: IPv6 brackets, wildcards, what others are told."""

import ipaddress
import socket

_WILDCARDS = frozenset({"", "*", "0.0.0.0", "::"})


def host_port(host: str, port: int) -> str:
    """`host:port`, with brackets round an IPv6 address."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def advertised_host(host: str, advertise_host: str = "") -> str:
    """The host that others reach a listener on `host` by: `advertise_host` when given.

    A wildcard `host` is reached by this machine's name.
    """
    if advertise_host:
        return advertise_host
    return socket.gethostname() if host.strip("[]") in _WILDCARDS else host


def is_loopback(host: str) -> bool:
    """Whether a listener on `host` can be reached from this machine alone."""
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False
