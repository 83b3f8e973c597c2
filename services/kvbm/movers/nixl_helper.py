"""The process that holds NIXL's object agent, on behalf of nixl_objects.py.

Requests and answers are JSON messages on the socket whose descriptor is its argument; buffers come
as descriptors. It imports nothing of ours, does what it is told, and decides nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import mmap
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

_POLL_MS = 1
_MESSAGE_BYTES = 8192


@dataclass(slots=True)
class _Transfer:
    id: int
    handle: Any
    object: Any


class _Helper:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._agent: Any = None
        self._buffers: dict[int, tuple[mmap.mmap, int, Any]] = {}
        self._devices = itertools.count(1)
        self._running: list[_Transfer] = []

    def run(self) -> None:
        """Serves until the daemon hangs up."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        while True:
            if poller.poll(_POLL_MS if self._running else None):
                message, fds, _, _ = socket.recv_fds(self._connection, _MESSAGE_BYTES, 1)
                if not message:
                    return
                self._take(json.loads(message), fds)
            self._running = [t for t in self._running if not self._over(t)]

    def _take(self, request: dict[str, Any], fds: list[int]) -> None:
        if "unmap" in request:
            _, _, registered = self._buffers.pop(request["unmap"])
            self._agent.deregister_memory(registered, ["OBJ"])
            return
        try:
            if "open" in request:
                self._open(request["open"])
                self._tell(request["id"], "")
            else:
                self._begin(request, fds)
        except Exception as exc:  # NIXL's exceptions have no common base; the daemon decides
            self._tell(request["id"], repr(exc))

    def _open(self, parameters: dict[str, str]) -> None:
        try:
            # This one works with and without CUDA; `nixl` would import torch to find that out.
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except ImportError:
            from nixl._api import nixl_agent, nixl_agent_config
        logging.disable(logging.INFO)
        config = nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl_agent(f"forebay-{os.getpid()}", config)
        self._agent.create_backend("OBJ", parameters)

    def _begin(self, request: dict[str, Any], fds: list[int]) -> None:
        if fds:
            self._map(request["buffer"], request["capacity"], fds[0])
        _, address, _ = self._buffers[request["buffer"]]
        length, device = request["length"], next(self._devices)
        agent = self._agent
        target = agent.register_memory([(0, length, device, request["key"])], "OBJ", ["OBJ"])
        handle = agent.initialize_xfer(
            request["way"],
            agent.get_xfer_descs([(address, length, 0)], "DRAM"),
            agent.get_xfer_descs([(0, length, device)], "OBJ"),
            agent.name,
            backends=["OBJ"],
        )
        transfer = _Transfer(request["id"], handle, target)
        if agent.transfer(handle) == "ERR":
            self._end(transfer, "NIXL refused the transfer")
        else:
            self._running.append(transfer)

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
        self._agent.deregister_memory(transfer.object, ["OBJ"])
        self._tell(transfer.id, error)

    def _map(self, id: int, capacity: int, fd: int) -> None:
        memory = mmap.mmap(fd, capacity)
        os.close(fd)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        registered = self._agent.register_memory([(address, capacity, 0, "")], "DRAM", ["OBJ"])
        self._buffers[id] = (memory, address, registered)

    def _tell(self, id: int, error: str) -> None:
        self._connection.send(json.dumps({"id": id, "error": error[:1000]}).encode())


def main() -> None:
    """Runs until the daemon hangs up or dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the daemon's business
    helper = _Helper(socket.socket(fileno=int(sys.argv[1])))
    helper.run()
    # Not by way of destructors: those of an agent wait for what is stalled.
    os._exit(0)


if __name__ == "__main__":
    main()
