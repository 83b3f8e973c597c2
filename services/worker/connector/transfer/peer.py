"""One NIXL agent that reads from one peer, and the thread that it belongs to.

All calls of the agent are made by that thread, since some take long (a copy between processes is
all done in the call that begins it) and the engine's must not wait for them. NIXL's own progress
threads would spin, each on a core of its own: the agent has none, and is driven here, hard while it
reads, now and then while it does not. At its end, by a read's deadline or by order, the thread
destroys the agent: that is the only thing that keeps NIXL from writing later.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.common.telemetry.logging import get_logger

LOCAL = "NIXL_INIT_AGENT"
_READING_PAUSE_S = 0.0001
"""Between two looks while it reads; others get the processor."""
_REST_S = 0.05
"""Between two looks while it doesn't: what it has told the peer must leave."""
_FAREWELL_S = 0.05
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
    """A read from a peer. `done` says that all of it is there."""

    peer: Peer
    make: Callable[[], Any]
    handle: Any = None
    until_s: float = 0.0
    done: bool = False
    telemetry: Any = None


class Peer:
    """One remote agent, and the local one that reads from it."""

    def __init__(self, name: str, agent: Any, timeout_s: float) -> None:
        """`timeout_s`: how long a read may take, from when it was begun."""
        self.name = name
        self.gone = False
        """Its agent has gone: nothing that it began can write any more."""
        self.fenced_s = 0.0
        """How long its end took, if a read's deadline brought it; 0: none did."""
        self._agent = agent
        self._timeout_s = timeout_s
        self._ending = False
        self._fencing = False
        self._local: dict[LocalList, Any] = {}
        self._remote: list[RemoteList] = []
        self._reads: list[Transfer] = []
        self._orders: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"nixl-peer-{name[:8]}", daemon=True)

    @property
    def usable(self) -> bool:
        """Whether its agent is there, and not about to go."""
        return not self._ending

    def start(self) -> None:
        """From now on the agent is the thread's."""
        self._thread.start()

    # Called by others; nothing waits.

    def prepare(self, descs: Any) -> RemoteList:
        """Descriptors of the peer's memory, for reads to come."""
        made = RemoteList(self, None)

        def order() -> None:
            made.handle = self._agent.prep_xfer_dlist(self.name, descs)
            self._remote.append(made)

        self._order(order)
        return made

    def read(
        self, local: LocalList, local_ids: Any, remote: RemoteList, remote_ids: Any, notice: bytes
    ) -> Transfer:
        """A read that `begin` begins; the peer is told `notice` at its end."""

        def make() -> Any:
            mine = self._local.get(local)
            if mine is None:
                mine = self._local[local] = self._agent.prep_xfer_dlist(LOCAL, local.descs)
            return self._agent.make_prepped_xfer(
                "READ", mine, local_ids, remote.handle, remote_ids, notif_msg=notice
            )

        return Transfer(self, make)

    def begin(self, transfer: Transfer) -> None:
        """Begins a read."""
        self._order(lambda: self._reads.append(transfer))

    def tell(self, notice: bytes) -> None:
        """Tells the peer something."""
        self._order(lambda: self._agent.send_notif(self.name, notif_msg=notice))

    def end(self) -> None:
        """Lets the agent go; `gone` says when."""
        self._ending = True
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Waits until it has gone, or for `timeout_s`."""
        self._thread.join(timeout_s)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._wake.set()

    # The thread.

    def _run(self) -> None:
        while not self._ending:
            try:
                reading = self._look()
            except Exception as exc:  # the library's boundary: it has no error class of its own
                self._fence(f"{type(exc).__name__}: {exc}")
                break
            self._wake.wait(_READING_PAUSE_S if reading else _REST_S)
            self._wake.clear()
        began = time.monotonic()
        self._ending = True
        try:
            self._farewell()
        finally:
            seconds = time.monotonic() - began
            if self._fencing:
                self.fenced_s = max(seconds, 1e-6)
                log.info("an agent is gone", peer=self.name, seconds=seconds)
            self.gone = True

    def _look(self) -> bool:
        """Carries orders out and looks how reads do; whether any is under way."""
        while self._orders:
            self._orders.popleft()()
        if not self._reads:
            # Nobody tells it anything; this lets it work.
            self._agent.get_new_notifs()
            return False
        for transfer in list(self._reads):
            if transfer.handle is None:
                transfer.handle = transfer.make()
                state = str(self._agent.transfer(transfer.handle))
                # Its time runs from here: what was begun before it may have taken long.
                transfer.until_s = _now() + self._timeout_s
                late = False
            else:
                state = str(self._agent.check_xfer_state(transfer.handle))
                late = _now() >= transfer.until_s
            if state == "DONE":
                transfer.telemetry = self._agent.get_xfer_telemetry(transfer.handle)
                self._reads.remove(transfer)
                _release(self._agent.release_xfer_handle, transfer.handle)
                transfer.done = True
            elif state != "PROC" or late:
                # An error of the transport isn't known to have stopped what was under way either.
                self._fence(state)
                return False
        return bool(self._reads)

    def _fence(self, why: str) -> None:
        log.warning("reads from a peer are ended", peer=self.name, state=why)
        self._fencing = True
        self._ending = True

    def _farewell(self) -> None:
        """In good order, with time for UCX to see what it must: it aborts the process when an
        agent goes whose connection has just broken, with messages still waiting.
        """
        agent, self._agent = self._agent, None
        self._orders.clear()
        try:
            _drive(agent)
            for transfer in self._reads:
                if transfer.handle is not None:
                    _release(agent.release_xfer_handle, transfer.handle)
            for made in self._remote:
                _release(agent.release_dlist_handle, made.handle)
            for handle in self._local.values():
                _release(agent.release_dlist_handle, handle)
            with contextlib.suppress(Exception):  # the library says in many ways that it is gone
                agent.remove_remote_agent(self.name)
            _drive(agent)
        finally:
            # What the library's object holds goes, though others may still hold the object.
            agent.agent = None


def _drive(agent: Any) -> None:
    """Lets a disused agent see what happened to its connections."""
    until_s = time.monotonic() + _FAREWELL_S
    while time.monotonic() < until_s:
        with contextlib.suppress(Exception):  # nobody waits for its news
            agent.get_new_notifs()
        time.sleep(0.001)


def _release(release: Callable[[Any], Any], handle: Any) -> None:
    """Lets go of an agent's handle; one that can't be released goes with the agent."""
    try:
        release(handle)
    except Exception as exc:  # the library's boundary: a read that is under way, a lost peer
        log.debug("a handle goes with its agent", error=repr(exc))
        handle._released = True  # noqa: SLF001 - the library has no other way
    # Else the handle would keep alive what is to end.
    handle._agent = None  # noqa: SLF001
