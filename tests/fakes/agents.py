"""NIXL agents without NIXL: reads that end when a test says so, and a destruction that shows."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class FakeHandle:
    """As the library's handles: bound to what the agent's object holds."""

    _agent: Any
    _released: bool = False
    posted: bool = False
    state: str = "PROC"


@dataclass(eq=False)
class FakeBinding:
    """What the library's object holds; its end is the end of all it began."""

    ended: threading.Event = field(default_factory=threading.Event)
    hold: threading.Event | None = None

    def __del__(self) -> None:
        if self.hold is not None:
            self.hold.wait(5)
        self.ended.set()


class FakeAgent:
    """The part of nixl_agent that vLLM's connector uses; notes which threads call it."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.name = f"agent-{next(self.numbers)}"
        self.agent: FakeBinding | None = FakeBinding()
        self.ended = self.agent.ended
        self.registered: list[Any] = []
        self.prepared: list[tuple[str, Any]] = []
        self.handles: list[FakeHandle] = []
        self.unsent: list[bytes] = []
        self.sent: list[bytes] = []
        self.inbox: dict[str, list[bytes]] = {}
        self.broken = False
        self.copying: threading.Event | None = None
        """A read is begun when it is set: as a copy between processes, which is all done then."""
        self.threads: set[str] = set()
        self.peer = ""

    def _called(self) -> None:
        self.threads.add(threading.current_thread().name)

    def get_reg_descs(self, *arguments: Any) -> Any:
        return ("reg", *arguments)

    def get_xfer_descs(self, *arguments: Any) -> Any:
        return ("xfer", *arguments)

    def register_memory(self, descs: Any, backends: list[str]) -> Any:
        self.registered.append(descs)
        return descs

    def deregister_memory(self, descs: Any) -> None:
        self.registered.remove(descs)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.peer = metadata.decode()
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self._called()
        assert name == self.peer

    def prep_xfer_dlist(self, name: str, descs: Any) -> FakeHandle:
        self._called()
        self.prepared.append((name, descs))
        return FakeHandle(self.agent)

    def release_dlist_handle(self, handle: FakeHandle) -> None:
        self._called()

    def make_prepped_xfer(self, *arguments: Any, notif_msg: bytes = b"") -> FakeHandle:
        self._called()
        handle = FakeHandle(self.agent)
        self.handles.append(handle)
        return handle

    def transfer(self, handle: FakeHandle) -> str:
        self._called()
        if self.copying is not None:
            self.copying.wait(5)
        handle.posted = True
        return handle.state

    def check_xfer_state(self, handle: FakeHandle) -> str:
        self._called()
        if handle.state == "raise":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return handle.state

    def release_xfer_handle(self, handle: FakeHandle) -> None:
        self._called()
        if handle.state == "PROC":
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")

    def get_xfer_telemetry(self, handle: FakeHandle) -> str:
        return "telemetry"

    def send_notif(self, name: str, notif_msg: bytes) -> None:
        self._called()
        self.unsent.append(notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self._called()
        if self.broken:
            raise RuntimeError("NIXL_ERR_BACKEND")
        # What was told leaves when the agent is driven.
        self.sent += self.unsent
        self.unsent = []
        inbox, self.inbox = self.inbox, {}
        return inbox
