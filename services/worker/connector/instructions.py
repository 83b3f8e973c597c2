"""What a plan wants of the client of kvbm."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.connector.model import Slot
from services.worker.connector.terms import Terms


@dataclass(frozen=True, slots=True)
class Fill:
    """A slot whose copy is over: what it holds now, or that it is given back (no key)."""

    owner: int
    slot: Slot
    key: bytes = b""
    parent: bytes = b""
    position: int = 0
    tenant: str = ""
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease's end: blocks loaded, seconds, and blocks (counted from its first) found bad."""

    lease: int
    loaded: int = 0
    seconds: float = 0.0
    bad: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Await:
    """Tell when the promotions of a request's lease are over, or what is there at `until_s`."""

    request: str
    lease: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """Look a request's blocks up again: the engine holds fewer of them than was assumed."""

    request: str
    keys: tuple[bytes, ...]
    skip: int
    terms: Terms
    until_s: float


@dataclass(slots=True)
class Instructions:
    """All that is to be done, in no order."""

    fills: list[Fill] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    awaits: list[Await] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.fills or self.ended or self.awaits or self.asks)
