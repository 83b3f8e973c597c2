"""NIXL agents for an engine that hands out KV and takes it: one for each peer, behind vLLM's one.

vLLM's NixlConnector knows a single agent. `PeerAgents` looks like it and is several: `own` holds
the memory that others read and hears their notices; what is read from a peer goes through an agent
that serves that peer alone. So a read that doesn't end can be ended: destroying an agent is the
only thing that keeps NIXL from writing later (releasing a handle is not), and it concerns one peer.

NIXL's own progress threads spin, each on a core of its own: agents are made without. A thread here
drives all of them, hard while something is read, now and then while nothing is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.telemetry.logging import get_logger

LOCAL = "NIXL_INIT_AGENT"
_READING_PAUSE_S = 0.0001
"""Between two looks while something is read; others get the processor."""
_EAGER_PAUSE_S = 0.001
"""... while somebody is expected to read from us: over TCP it is we who send."""
_IDLE_PAUSE_S = 0.02
_FAREWELL_S = 0.05
_STOP_TIMEOUT_S = 5.0
_now = time.monotonic
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
    """A read from a peer. `state` is the last that was seen of it: "PROC", "DONE" or "ERR"."""

    peer: Peer
    handle: Any
    state: str = "PROC"
    posted: bool = False
    until_s: float = 0.0
    telemetry: Any = None


@dataclass(slots=True, eq=False)
class Peer:
    """One remote agent, and the local one that reads from it. `lock` is held for calls to it."""

    name: str
    agent: Any
    lock: threading.Lock = field(default_factory=threading.Lock)
    local: dict[LocalList, Any] = field(default_factory=dict)
    remote: list[RemoteList] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    ending: bool = False
    """Its agent is about to go."""
    gone: bool = False
    """It has gone: nothing that it began can write any more."""

    @property
    def usable(self) -> bool:
        """Whether its agent is there, and not about to go."""
        return not self.ending


class PeerAgents:
    """Looks like a `nixl_agent` to vLLM. For the engine's thread; `add_remote_agent` for another.

    `own` is an agent, `make` makes further ones, without threads of their own. A read that takes
    longer than `timeout_s` ends as failed, with all others from that peer, when its agent is
    destroyed. `close` ends the thread.
    """

    def __init__(self, own: Any, make: Callable[[], Any], timeout_s: float) -> None:
        self._own = own
        self._own_lock = threading.Lock()
        self._make = make
        self._timeout_s = timeout_s
        self._registered: list[tuple[Any, Sequence[str]]] = []
        self._peers: dict[str, Peer] = {}
        self._notices: deque[tuple[str, list[bytes]]] = deque()
        self.eager = False
        """Whether somebody is expected to read from us."""
        self.fences = 0
        """Agents that were destroyed to end their reads, so far."""
        self.fence_s = 0.0
        """Longest time that took, in seconds."""
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._drive, name="nixl-progress", daemon=True)
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
        """As nixl_agent's; ends all reads."""
        for name in list(self._peers):
            self.remove_remote_agent(name)
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
        self._peers[name] = Peer(name, agent)
        return name

    def remove_remote_agent(self, name: str) -> None:
        """Destroys a peer's agent. Its reads are over when this returns."""
        peer = self._peers.pop(name, None)
        if peer is not None and peer.usable:
            peer.ending = True
            self._destroy(peer)

    def check_remote_metadata(self, name: str) -> bool:
        """Whether there is an agent for that peer, in working order."""
        peer = self._peers.get(name)
        return peer is not None and peer.usable

    def send_notif(self, name: str, notif_msg: bytes) -> None:
        """As nixl_agent's. Raises KeyError for a peer whose agent is gone."""
        peer = self._peers[name]
        with peer.lock:
            if not peer.usable:
                raise KeyError(name)
            peer.agent.send_notif(name, notif_msg=notif_msg)

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
        if name == LOCAL:
            return LocalList(descs)
        peer = self._peers[name]
        with peer.lock:
            made = RemoteList(peer, peer.agent.prep_xfer_dlist(name, descs))
            peer.remote.append(made)
        return made

    def release_dlist_handle(self, handle: LocalList | RemoteList) -> None:
        """As nixl_agent's."""
        if isinstance(handle, LocalList):
            for peer in list(self._peers.values()):
                with peer.lock:
                    made = peer.local.pop(handle, None)
                    if made is not None and peer.usable:
                        peer.agent.release_dlist_handle(made)
            return
        peer = handle.peer
        with peer.lock:
            if handle in peer.remote and peer.usable:
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
        with peer.lock:
            if not peer.usable:
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
        """As nixl_agent's; begun by the thread, since a copy between processes may be all done in
        this call.
        """
        transfer.until_s = _now() + self._timeout_s
        self._wake.set()
        return "PROC"

    def check_xfer_state(self, transfer: Transfer) -> str:
        """`DONE`, `PROC`, or `ERR` once it is certain that it writes nothing any more."""
        if transfer.state == "DONE":
            return "DONE"
        return "ERR" if transfer.peer.gone else "PROC"

    def get_xfer_telemetry(self, transfer: Transfer) -> Any:
        """As nixl_agent's."""
        return transfer.telemetry

    def release_xfer_handle(self, transfer: Transfer) -> None:
        """As nixl_agent's; one that isn't over ends when its agent is destroyed."""
        peer = transfer.peer
        with peer.lock:
            if transfer in peer.transfers and peer.usable:
                peer.transfers.remove(transfer)
                peer.agent.release_xfer_handle(transfer.handle)

    def close(self) -> None:
        """Ends the thread; agents are driven no more."""
        self._stopped = True
        self._wake.set()
        self._thread.join(_STOP_TIMEOUT_S)

    # The thread.

    def _drive(self) -> None:
        while not self._stopped:
            try:
                reading = self._look()
            except Exception:  # the thread's boundary: reads that nobody drives end as late
                log.exception("looking after transfers failed")
                reading = False
            pause = _EAGER_PAUSE_S if self.eager else _IDLE_PAUSE_S
            self._wake.wait(_READING_PAUSE_S if reading else pause)
            self._wake.clear()

    def _look(self) -> bool:
        """Lets all agents make progress; whether something is being read."""
        with self._own_lock:
            told = self._own.get_new_notifs()
        for name, messages in told.items():
            self._notices.append((name, list(messages)))
        reading = False
        for peer in list(self._peers.values()):
            with peer.lock:
                if peer.usable:
                    reading |= self._look_at(peer)
        return reading

    def _look_at(self, peer: Peer) -> bool:
        now = _now()
        reading = False
        for transfer in peer.transfers:
            if transfer.state == "DONE" or not transfer.until_s:
                continue
            state = self._advance(peer, transfer)
            if state == "DONE":
                transfer.state = state
            elif state != "PROC" or now >= transfer.until_s:
                # An error of the transport isn't known to have stopped what was under way either.
                log.warning("reads from a peer are ended", peer=peer.name, state=state)
                self._fence(peer)
                return False
            else:
                reading = True
        return reading

    def _advance(self, peer: Peer, transfer: Transfer) -> str:
        """Begins a read, or looks how it does; an exception is an error, and says why."""
        try:
            if not transfer.posted:
                transfer.posted = True
                state = str(peer.agent.transfer(transfer.handle))
            else:
                state = str(peer.agent.check_xfer_state(transfer.handle))
            if state == "DONE":
                transfer.telemetry = peer.agent.get_xfer_telemetry(transfer.handle)
        except Exception as exc:  # the library's boundary: it has no error class of its own
            return f"{type(exc).__name__}: {exc}"
        return state

    def _fence(self, peer: Peer) -> None:
        """Destroys an agent beside all others, which may take a while."""
        peer.ending = True
        threading.Thread(
            target=self._ended, args=(peer,), name=f"nixl-fence-{peer.name[:8]}", daemon=True
        ).start()

    def _ended(self, peer: Peer) -> None:
        began = time.monotonic()
        self._destroy(peer)
        seconds = time.monotonic() - began
        self.fences += 1
        self.fence_s = max(self.fence_s, seconds)
        log.info("an agent is gone", peer=peer.name, seconds=seconds)

    def _destroy(self, peer: Peer) -> None:
        with peer.lock:
            agent, peer.agent = peer.agent, None
            transfers, peer.transfers = peer.transfers, []
            remote, peer.remote = peer.remote, []
            local, peer.local = peer.local, {}
        # In good order, with time for UCX to see what it must: it aborts the process when an agent
        # goes whose connection has just broken, with messages still waiting.
        _drive(agent)
        for transfer in transfers:
            _release(agent.release_xfer_handle, transfer.handle)
            transfer.handle = None
        for made in remote:
            _release(agent.release_dlist_handle, made.handle)
            made.handle = None
        for handle in local.values():
            _release(agent.release_dlist_handle, handle)
        with contextlib.suppress(Exception):  # the library says in many ways that it is gone
            agent.remove_remote_agent(peer.name)
        _drive(agent)
        _end(agent)
        del agent
        peer.gone = True


def _drive(agent: Any) -> None:
    """Lets a disused agent see what happened to its connections."""
    until_s = time.monotonic() + _FAREWELL_S
    while time.monotonic() < until_s:
        with contextlib.suppress(Exception):  # nobody waits for its news
            agent.get_new_notifs()
        time.sleep(_EAGER_PAUSE_S)


def _release(release: Callable[[Any], Any], handle: Any) -> None:
    """Lets go of an agent's handle; one that can't be released goes with the agent."""
    try:
        release(handle)
    except Exception as exc:  # the library's boundary: a read that is under way, a lost peer
        log.debug("a handle goes with its agent", error=repr(exc))
        handle._released = True  # noqa: SLF001 - the library has no other way
    # Else the handle would keep alive what is to end.
    handle._agent = None  # noqa: SLF001


def _end(agent: Any) -> None:
    """Destroys what the library's object holds, though others may still hold the object."""
    agent.agent = None
