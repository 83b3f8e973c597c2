"""NIXL agents for an engine that hands out KV and takes it: one for each peer, behind vLLM's one.

vLLM's NixlConnector knows a single agent. `PeerAgents` looks like it and is several: `own` holds
the memory that others read and hears their notices; what is read from a peer goes through an agent
that serves that peer alone (peer.py), so that its end concerns one peer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from services.common.telemetry.logging import get_logger
from services.worker.connector.transfer.peer import LOCAL, LocalList, Peer, RemoteList, Transfer

_EAGER_PAUSE_S = 0.001
"""Between two looks while somebody is expected to read from us: over TCP it is we who send."""
_IDLE_PAUSE_S = 0.02
_STOP_TIMEOUT_S = 5.0
log = get_logger(__name__)


class PeerAgents:
    """Looks like a `nixl_agent` to vLLM. For the engine's thread; `add_remote_agent` for another.

    `own` is an agent, `make` makes further ones, without threads of their own. A read that takes
    longer than `timeout_s` ends as failed, with all others from that peer, when its agent is
    destroyed. `close` ends all threads.
    """

    def __init__(self, own: Any, make: Callable[[], Any], timeout_s: float) -> None:
        self._own = own
        self._own_lock = threading.Lock()
        self._make = make
        self._timeout_s = timeout_s
        self._registered: list[tuple[Any, Sequence[str]]] = []
        self._peers: dict[str, Peer] = {}
        self._leaving: list[Peer] = []
        """Those whose agents are about to go, though vLLM has forgotten them."""
        self._notices: deque[tuple[str, list[bytes]]] = deque()
        self.eager = False
        """Whether somebody is expected to read from us."""
        self.fences = 0
        """Agents that were destroyed to end their reads, so far."""
        self.fence_s = 0.0
        """Longest time that took, in seconds."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._drive, name="nixl-own", daemon=True)
        self._thread.start()

    # Memory: registered with every agent.

    def get_reg_descs(self, *arguments: Any) -> Any:
        """As nixl_agent's."""
        return self._own.get_reg_descs(*arguments)

    def get_xfer_descs(self, *arguments: Any) -> Any:
        """As nixl_agent's."""
        return self._own.get_xfer_descs(*arguments)

    def register_memory(self, descs: Any, *, backends: Sequence[str] = ()) -> Any:
        """As nixl_agent's; agents made later register the same."""
        self._registered.append((descs, tuple(backends)))
        with self._own_lock:
            return self._own.register_memory(descs, backends=list(backends))

    def deregister_memory(self, descs: Any) -> None:
        """As nixl_agent's; ends all reads first."""
        for name in list(self._peers):
            self.remove_remote_agent(name)
        for peer in self._leaving:
            peer.join(_STOP_TIMEOUT_S)
        self._registered = [entry for entry in self._registered if entry[0] is not descs]
        with self._own_lock:
            self._own.deregister_memory(descs)

    def get_agent_metadata(self) -> bytes:
        """What peers need to read from us."""
        with self._own_lock:
            return bytes(self._own.get_agent_metadata())

    # Peers.

    def add_remote_agent(self, metadata: bytes) -> str:
        """Makes an agent for a peer; returns the peer's name."""
        agent = self._make()
        for descs, backends in self._registered:
            agent.register_memory(descs, backends=list(backends))
        name = agent.add_remote_agent(metadata)
        name = name.decode() if isinstance(name, bytes) else str(name)
        peer = Peer(name, agent, self._timeout_s)
        peer.start()
        self._peers[name] = peer
        return name

    def remove_remote_agent(self, name: str) -> None:
        """Lets a peer's agent go. vLLM asks for it when nothing is read from that peer."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.end()
            self._leaving.append(peer)

    def check_remote_metadata(self, name: str) -> bool:
        """Whether there is an agent for that peer, in working order."""
        peer = self._peers.get(name)
        return peer is not None and peer.usable

    def send_notif(self, name: str, notif_msg: bytes) -> None:
        """As nixl_agent's. Raises KeyError for a peer whose agent is gone."""
        peer = self._peers[name]
        if not peer.usable:
            raise KeyError(name)
        peer.tell(notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """What peers told us since the last call."""
        told: dict[str, list[bytes]] = {}
        while self._notices:
            name, messages = self._notices.popleft()
            told.setdefault(name, []).extend(messages)
        return told

    # Reads.

    def prep_xfer_dlist(self, name: str, descs: Any) -> LocalList | RemoteList:
        """As nixl_agent's."""
        return LocalList(descs) if name == LOCAL else self._peers[name].prepare(descs)

    def release_dlist_handle(self, handle: LocalList | RemoteList) -> None:
        """Nothing: a list goes with the agents that prepared it."""

    def make_prepped_xfer(
        self,
        operation: str,
        local: LocalList,
        local_ids: Any,
        remote: RemoteList,
        remote_ids: Any,
        notif_msg: bytes = b"",
    ) -> Transfer:
        """As nixl_agent's, for reads. Raises KeyError for a peer whose agent is gone."""
        assert operation == "READ", "vLLM's pulling connector writes nothing"
        if not remote.peer.usable:
            raise KeyError(remote.peer.name)
        return remote.peer.read(local, local_ids, remote, remote_ids, notif_msg)

    def transfer(self, transfer: Transfer) -> str:
        """As nixl_agent's."""
        transfer.peer.begin(transfer)
        return "PROC"

    def check_xfer_state(self, transfer: Transfer) -> str:
        """`DONE`, `PROC`, or `ERR` once it is certain that it writes nothing any more."""
        if transfer.done:
            return "DONE"
        return "ERR" if transfer.peer.gone else "PROC"

    def get_xfer_telemetry(self, transfer: Transfer) -> Any:
        """As nixl_agent's."""
        return transfer.telemetry

    def release_xfer_handle(self, transfer: Transfer) -> None:
        """Nothing: one that is done is let go of; one that isn't ends with its agent."""

    def close(self) -> None:
        """Lets all agents of peers go, and ends our own one's thread."""
        for name in list(self._peers):
            self.remove_remote_agent(name)
        for peer in self._leaving:
            peer.join(_STOP_TIMEOUT_S)
        self._stopped.set()
        self._thread.join(_STOP_TIMEOUT_S)

    # Our own agent's thread.

    def _drive(self) -> None:
        deaf = False
        while not self._stopped.wait(_EAGER_PAUSE_S if self.eager else _IDLE_PAUSE_S):
            self._count()
            try:
                with self._own_lock:
                    told = self._own.get_new_notifs()
            except Exception as exc:  # the library's boundary; leases end what hangs on it
                if not deaf:
                    log.warning("peers' notices can't be heard", error=repr(exc))
                deaf = True
                continue
            deaf = False
            for name, messages in told.items():
                self._notices.append((name, list(messages)))

    def _count(self) -> None:
        gone = [peer for peer in self._leaving if peer.gone]
        for peer in gone:
            self._leaving.remove(peer)
            if peer.fenced_s:
                self.fences += 1
                self.fence_s = max(self.fence_s, peer.fenced_s)
