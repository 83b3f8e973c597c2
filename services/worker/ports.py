"""What the worker's shell needs of the world beside the engine (engines/port.py)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

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


class Sink(Protocol):
    """Who gets a request's news. Loop's thread only."""

    @property
    def closed(self) -> bool:
        """Whether nobody is left to read."""
        ...

    def push(self, step: int, delta: Delta) -> None:
        """Takes news; never blocks."""
        ...
