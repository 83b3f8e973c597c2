"""The process that holds one NIXL agent for memory of peers, on behalf of nixl_peers.py.

It either shows a window to peers, or reads from the window of one peer. Requests and answers are
JSON messages on the socket whose descriptor is its argument; memory comes as descriptors. It
imports nothing of ours, does what it is told, and decides nothing.
"""

from __future__ import annotations

import base64
import ctypes
import json
import logging
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

_MESSAGE_BYTES = 1 << 16
_FIRST_NAP_S = 0.00002
_LONGEST_NAP_S = 0.0005
_WORK_S = 0.00005
"""From so long on a look at the window was work: bytes were sent."""
_REST_MS = 20
"""Between two looks at a window that nobody is expected to read."""
_MADV_POPULATE_WRITE = 23
_PAGE = 4096


@dataclass(slots=True)
class _Transfer:
    id: int
    handle: Any
    began: float


@dataclass(slots=True)
class _Region:
    memory: mmap.mmap
    """Kept mapped, and registered, for as long as the process lives."""
    address: int
    registered: Any


class _Helper:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._agent: Any = None
        self._regions: dict[int, _Region] = {}
        self._running: list[_Transfer] = []
        self._shows = False
        """Whether peers read from it: by TCP, what they read is sent by this process."""
        self._nap_s = _FIRST_NAP_S
        self._expected_until = 0.0
        """Until when they are expected to."""
        self._libc = ctypes.CDLL(None)

    def run(self) -> None:
        """Serves until the daemon hangs up."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        while True:
            if poller.poll(self._patience_ms()):
                message, fds, _, _ = socket.recv_fds(self._connection, _MESSAGE_BYTES, 1)
                if not message:
                    return
                self._take(json.loads(message), fds)
            self._running = [t for t in self._running if not self._over(t)]
            if self._shows and self._agent is not None:
                # NIXL's own thread would do it, and spin on a core of its own for ever.
                began = time.monotonic()
                self._agent.get_new_notifs()
                ended = time.monotonic()
                if ended < self._expected_until:
                    # Short ones as long as there is something to do; what reads by itself (shared
                    # memory, RDMA) leaves nothing.
                    worked = ended - began > _WORK_S
                    self._nap_s = _FIRST_NAP_S if worked else min(2 * self._nap_s, _LONGEST_NAP_S)
                    time.sleep(self._nap_s)
            if self._running:
                # A part of what the youngest took so far: late by that at most.
                nap = (time.monotonic() - self._running[-1].began) / 25
                time.sleep(min(max(nap, _FIRST_NAP_S), _LONGEST_NAP_S))

    def _patience_ms(self) -> int | None:
        """How long to wait for a word of the daemon's; None: for ever."""
        if self._running or time.monotonic() < self._expected_until:
            return 0
        return _REST_MS if self._shows else None

    def _take(self, request: dict[str, Any], fds: list[int]) -> None:
        id = request["id"]
        if "expect" in request:
            self._shows = True
            self._expected_until = time.monotonic() + request["expect"]
            self._nap_s = _FIRST_NAP_S
            return
        try:
            if "open" in request:
                self._tell(id, metadata=self._open(request["open"]))
            elif "map" in request:
                self._tell(id, **self._map(request["map"], request["length"], fds[0]))
            elif "peer" in request:
                name = self._agent.add_remote_agent(base64.b64decode(request["peer"]))
                self._tell(id, agent=name.decode() if isinstance(name, bytes) else name)
            else:
                self._read(id, request)
        except Exception as exc:  # NIXL's exceptions have no common base; the daemon decides
            self._tell(id, error=repr(exc))

    def _open(self, name: str) -> str:
        try:
            # This one works with and without CUDA; `nixl` would import torch to find that out.
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except ImportError:
            from nixl._api import nixl_agent, nixl_agent_config
        logging.disable(logging.INFO)
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = nixl_agent(name, config)
        return self._metadata()

    def _metadata(self) -> str:
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def _map(self, id: int, length: int, fd: int) -> dict[str, Any]:
        memory = mmap.mmap(fd, length)
        os.close(fd)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        registered = self._agent.register_memory([(address, length, 0, "")], "DRAM", ["UCX"])
        self._regions[id] = _Region(memory, address, registered)
        return {"address": address, "metadata": self._metadata()}

    def _read(self, id: int, request: dict[str, Any]) -> None:
        base = self._regions[request["region"]].address
        here, there = [], []
        for offset, address, length in request["read"]:
            self._touch(base + offset, length)
            here.append((base + offset, length, 0))
            there.append((address, length, 0))
        agent = self._agent
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(here, "DRAM"),
            agent.get_xfer_descs(there, "DRAM"),
            request["agent"],
            backends=["UCX"],
        )
        transfer = _Transfer(id, handle, time.monotonic())
        state = agent.transfer(handle)
        if state == "PROC":
            self._running.append(transfer)
        else:
            self._end(transfer, "" if state == "DONE" else f"NIXL says {state}")

    def _touch(self, address: int, length: int) -> None:
        """Maps the pages before the transfer: faults in its midst would halve its rate."""
        start = address // _PAGE * _PAGE
        size = -(-(address + length - start) // _PAGE) * _PAGE
        # Refused by a kernel before 5.14: then they fault.
        self._libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)

    def _over(self, transfer: _Transfer) -> bool:
        try:
            state = self._agent.check_xfer_state(transfer.handle)
        except Exception as exc:  # as above
            self._end(transfer, repr(exc))
            return True
        if state == "PROC":
            return False
        self._end(transfer, "" if state == "DONE" else f"NIXL says {state}")
        return True

    def _end(self, transfer: _Transfer, error: str) -> None:
        self._agent.release_xfer_handle(transfer.handle)
        self._tell(transfer.id, error=error, seconds=time.monotonic() - transfer.began)

    def _tell(self, id: int, *, error: str = "", **more: Any) -> None:
        self._connection.send(json.dumps({"id": id, "error": error[:1000], **more}).encode())


def main() -> None:
    """Runs until the daemon hangs up or dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # UCX aborts when a peer is not as expected
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the daemon's business
    helper = _Helper(socket.socket(fileno=int(sys.argv[1])))
    helper.run()
    # Not by way of destructors: those of an agent wait for what is stalled.
    os._exit(0)


if __name__ == "__main__":
    main()
