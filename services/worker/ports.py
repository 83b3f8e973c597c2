"""What the worker's shell needs of the world beside the engine (engines/port.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.cards import Instance
from services.common.events.model import Event
from services.worker.core.model import Delta


class Publisher(Protocol):
    """A numbered event stream. Loop's thread only."""

    @property
    def sequence(self) -> int:
        """The last number given out; 0 before the first."""
        ...

    def publish(self, events: Sequence[Event]) -> int:
        """Sends `events` as one batch and returns its number. Never blocks."""
        ...


class Registered(Protocol):
    """A record in discovery."""

    async def update(self, instance: Instance, *, timeout_s: float = 2.0) -> None:
        """Changes the record."""
        ...


class Registrar(Protocol):
    """Puts records into discovery."""

    def registered(self, instance: Instance) -> AbstractAsyncContextManager[Registered]:
        """Keeps a record there while the context lasts."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """What is there of a prompt below the engine's own cache?"""

    keys: Sequence[bytes]
    """Full hashes of the leading blocks whose load would help."""
    have: int
    """Leading blocks that the engine has."""
    recompute_block_s: float = 0.0
    """Seconds the engine takes to compute a block; 0: not known."""
    wait_s: float = 0.0
    """Seconds that the request will wait anyway."""
    tenant: str = ""
    """On whose account its blocks are kept; empty: nobody's."""
    only_stored: bool = False
    """Nothing is to be loaded, since its KV comes from elsewhere: what needs no copy is asked."""


class Tiers(Protocol):
    """The tiers below the engine's cache. Loop's thread only."""

    async def look_up(self, question: Question) -> Mapping[str, Any]:
        """What the engine is to be told with the request. Never raises for a tier's sake."""
        ...

    def release(self, params: Mapping[str, Any]) -> None:
        """Takes back what `look_up` promised to a request that never reached the engine."""
        ...


class Sink(Protocol):
    """Who gets a request's news. Loop's thread only."""

    @property
    def closed(self) -> bool:
        """Whether nobody is left to read."""
        ...

    def push(self, step: int, delta: Delta) -> None:
        """Takes news; never blocks."""
        ...
