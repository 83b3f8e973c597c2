"""NIXL agents for an engine that hands out KV and takes it: one for each peer, behind vLLM's one.

vLLM's NixlConnector knows a single agent. `PeerAgents` looks like it and is several: `own` holds
the memory that others read and hears their notices; what is read from a peer goes through an agent
that serves that peer alone. So a read that doesn't end can be ended: destroying an agent is the
only thing that keeps NIXL from writing later (releasing a handle is not), and it concerns one peer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.telemetry.logging import get_logger

LOCAL = "NIXL_INIT_AGENT"
log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class LocalList:
    """Descriptors of our own memory; each peer's agent prepares them when it first needs them."""

    descs: Any


@dataclass(slots=True, eq=False)
class RemoteList:
    """Descriptors of a peer's memory, prepared by its agent."""

    peer: Peer
    handle: Any


@dataclass(slots=True, eq=False)
class Transfer:
    """A read from a peer. Without a `handle` it is over, since its agent is destroyed."""

    peer: Peer
    handle: Any
    until_s: float = 0.0


@dataclass(slots=True, eq=False)
class Peer:
    """One remote agent, and the local one that reads from it."""

    name: str
    agent: Any
    """None once it is destroyed: nothing that it began can write any more."""
    local: dict[LocalList, Any] = field(default_factory=dict)
    remote: list[RemoteList] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    fencing: bool = False


class PeerAgents:
    """Looks like a `nixl_agent` to vLLM. For the engine's thread; `add_remote_agent` for another.

    `own` is an agent, `make` makes further ones. A read that takes longer than `timeout_s` ends as
    failed, with all others from that peer, when its agent is destroyed.
    """

    def __init__(self, own: Any, make: Callable[[], Any], timeout_s: float) -> None:
        self._own = own
        self._make = make
        self._timeout_s = timeout_s
        self._registered: list[tuple[Any, Sequence[str]]] = []
        self._peers: dict[str, Peer] = {}
        self.fences = 0
        """Agents that were destroyed to end their reads, so far."""
        self.fence_s = 0.0
        """Longest time that took, in seconds."""

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
        return self._own.register_memory(descs, backends=list(backends))

    def deregister_memory(self, descs: Any) -> None:
        """As nixl_agent's; ends all reads."""
        for name in list(self._peers):
            self.remove_remote_agent(name)
        self._registered = [entry for entry in self._registered if entry[0] is not descs]
        self._own.deregister_memory(descs)

    def get_agent_metadata(self) -> bytes:
        """What peers need to read from us."""
        return bytes(self._own.get_agent_metadata())

    # Peers.

    def add_remote_agent(self, metadata: bytes) -> str:
        """Makes an agent for a peer; returns the peer's name."""
        agent = self._make()
        for descs, backends in self._registered:
            agent.register_memory(descs, backends=list(backends))
        name = agent.add_remote_agent(metadata)
        name = name.decode() if isinstance(name, bytes) else str(name)
        self._peers[name] = Peer(name, agent)
        return name

    def remove_remote_agent(self, name: str) -> None:
        """Destroys a peer's agent. Its reads are over when this returns."""
        peer = self._peers.pop(name, None)
        if peer is not None and peer.agent is not None and not peer.fencing:
            self._destroy(peer)

    def check_remote_metadata(self, name: str) -> bool:
        """Whether there is an agent for that peer, in working order."""
        peer = self._peers.get(name)
        return peer is not None and peer.agent is not None and not peer.fencing

    def send_notif(self, name: str, notif_msg: bytes) -> None:
        """As nixl_agent's. Raises KeyError for a peer whose agent is gone."""
        peer = self._peers[name]
        if peer.agent is None or peer.fencing:
            raise KeyError(name)
        peer.agent.send_notif(name, notif_msg=notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """What peers tell us."""
        return dict(self._own.get_new_notifs())

    # Reads.

    def prep_xfer_dlist(self, name: str, descs: Any) -> LocalList | RemoteList:
        """As nixl_agent's."""
        if name == LOCAL:
            return LocalList(descs)
        peer = self._peers[name]
        made = RemoteList(peer, peer.agent.prep_xfer_dlist(name, descs))
        peer.remote.append(made)
        return made

    def release_dlist_handle(self, handle: LocalList | RemoteList) -> None:
        """As nixl_agent's."""
        if isinstance(handle, LocalList):
            for peer in self._peers.values():
                made = peer.local.pop(handle, None)
                if made is not None and peer.agent is not None and not peer.fencing:
                    peer.agent.release_dlist_handle(made)
            return
        peer = handle.peer
        if handle in peer.remote and peer.agent is not None and not peer.fencing:
            peer.remote.remove(handle)
            peer.agent.release_dlist_handle(handle.handle)

    def make_prepped_xfer(
        self,
        operation: str,
        local: LocalList,
        local_ids: Any,
        remote: RemoteList,
        remote_ids: Any,
        notif_msg: bytes = b"",
    ) -> Transfer:
        """As nixl_agent's. Raises KeyError for a peer whose agent is gone."""
        peer = remote.peer
        if peer.agent is None or peer.fencing:
            raise KeyError(peer.name)
        mine = peer.local.get(local)
        if mine is None:
            mine = peer.local[local] = peer.agent.prep_xfer_dlist(LOCAL, local.descs)
        handle = peer.agent.make_prepped_xfer(
            operation, mine, local_ids, remote.handle, remote_ids, notif_msg=notif_msg
        )
        made = Transfer(peer, handle)
        peer.transfers.append(made)
        return made

    def transfer(self, transfer: Transfer) -> str:
        """As nixl_agent's."""
        transfer.until_s = time.monotonic() + self._timeout_s
        return str(transfer.peer.agent.transfer(transfer.handle))

    def check_xfer_state(self, transfer: Transfer) -> str:
        """ "DONE", "PROC", or "ERR" once it is certain that it writes nothing any more."""
        peer = transfer.peer
        if peer.agent is None:
            return "ERR"
        if peer.fencing:
            return "PROC"
        state = str(peer.agent.check_xfer_state(transfer.handle))
        if state == "DONE":
            return state
        if state != "PROC" or time.monotonic() >= transfer.until_s:
            # An error of the transport isn't known to have stopped what was under way either.
            log.warning("reads from a peer are ended", peer=peer.name, state=state)
            self._fence(peer)
        return "PROC"

    def get_xfer_telemetry(self, transfer: Transfer) -> Any:
        """As nixl_agent's."""
        return transfer.peer.agent.get_xfer_telemetry(transfer.handle)

    def release_xfer_handle(self, transfer: Transfer) -> None:
        """As nixl_agent's; one that isn't over ends when its agent is destroyed."""
        peer = transfer.peer
        if transfer in peer.transfers and not peer.fencing:
            peer.transfers.remove(transfer)
            if peer.agent is not None:
                peer.agent.release_xfer_handle(transfer.handle)

    def _fence(self, peer: Peer) -> None:
        """Destroys an agent beside the engine, which may take a while."""
        peer.fencing = True
        threading.Thread(
            target=self._destroy, args=(peer,), name=f"nixl-fence-{peer.name[:8]}", daemon=True
        ).start()

    def _destroy(self, peer: Peer) -> None:
        began = time.monotonic()
        fenced = peer.fencing
        agent = peer.agent
        for transfer in peer.transfers:
            _drop(transfer.handle)
            transfer.handle = None
        for made in peer.remote:
            _drop(made.handle)
            made.handle = None
        for handle in peer.local.values():
            _drop(handle)
        peer.transfers.clear()
        peer.remote.clear()
        peer.local.clear()
        _end(agent)
        del agent
        peer.agent = None
        peer.fencing = False
        if fenced:
            self.fences += 1
            self.fence_s = max(self.fence_s, time.monotonic() - began)
            log.info("an agent is gone", peer=peer.name, seconds=time.monotonic() - began)


def _drop(handle: Any) -> None:
    """Lets go of an agent's handle without a word to the agent, which is about to go itself."""
    handle._released = True  # noqa: SLF001 - the library has no other way
    handle._agent = None  # noqa: SLF001


def _end(agent: Any) -> None:
    """Destroys what the library's object holds, though others may still hold the object."""
    agent.agent = None
