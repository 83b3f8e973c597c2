"""Ports: free or taken, and a message that says who holds one and what to do."""

import os
import random
import socket
from collections.abc import Iterator

import pytest

from services.cli.errors import PortTaken
from services.cli.up.ports import PortUse, check_free, free_port, holder, is_free, listening_inodes

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0
   1: 0100007F:1F40 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0
   2: 00000000:094B 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4713 1 0
"""


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_only_listening_sockets_count() -> None:
    assert listening_inodes(TABLE, 8000) == {"4711"}
    assert listening_inodes(TABLE, 2379) == {"4713"}
    assert listening_inodes(TABLE, 40000) == set()


def test_message_names_port_flag_and_holder(taken: int) -> None:
    with pytest.raises(PortTaken) as caught:
        check_free([PortUse(taken, "gateway", "--gateway-port")])
    assert str(taken) in caught.value.message
    assert "--gateway-port" in caught.value.message
    assert f"pid {os.getpid()}," in caught.value.message
    assert "--gateway-port" in caught.value.hint and "--auto-ports" in caught.value.hint


def test_every_taken_port_is_named(taken: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        second = other.getsockname()[1]
        uses = [PortUse(taken, "etcd", "--etcd-port"), PortUse(second, "router-0", "--router-port")]
        with pytest.raises(PortTaken) as caught:
            check_free(uses)
    assert str(taken) in caught.value.message and str(second) in caught.value.message


def test_free_ports_pass_and_lie_below_the_ephemeral_range(taken: int) -> None:
    assert not is_free(taken)
    port = free_port(rng=random.Random(1))
    assert is_free(port)
    check_free([PortUse(port, "gateway", "--gateway-port")])
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        assert port < int(file.read().split()[0])


def test_nobody_holds_a_free_port() -> None:
    assert holder(free_port()) == ""
