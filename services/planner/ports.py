"""What the planner's shell needs from outside."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from services.common.cards import Role

Clock = Callable[[], float]
"""Seconds on a steady clock (time.monotonic; tests bring their own)."""

SetRole = Callable[[str, Role, float], Awaitable[Role]]
"""Gives the worker at an address a role within so many seconds; its role before. Raises
ForebayError."""


class Claims(Protocol):
    """A claim on a job, which one of several has; Discovery's."""

    async def claim(self, job: str, who: str, ttl_s: float) -> bool:
        """Whether `who` has the job for the next `ttl_s`. Raises EtcdUnavailable, EtcdRefused."""

    async def resign(self, job: str, who: str) -> None:
        """Gives the job up, if `who` has it. Raises the same."""
