"""Exactly one active planner: a claim in etcd that expires unless it is renewed.

The holder believes in its claim for no longer than etcd keeps it, counted from before it asked; so
two never both believe. Before each act the claim is made anew (`confirmed`): one that lost it,
however that came, does not act. Without etcd nobody acts.
"""

from __future__ import annotations

import asyncio
from math import floor

from services.common.errors import ForebayError
from services.common.telemetry.logging import get_logger
from services.planner.ports import Claims, Clock

log = get_logger(__name__)

JOB = "planner"
_HELD = 0.6
"""Share of the lease time that a claim lasts, ..."""
_ROUND = 0.15
"""... and after which it is renewed, or tried again: so another takes over within a lease time."""


class Election:
    """This planner's candidacy. Loop's thread only; `who` is unique for each start."""

    def __init__(self, claims: Claims, who: str, lease_ttl_s: float, clock: Clock) -> None:
        self._claims = claims
        self._who = who
        self._clock = clock
        # etcd counts whole seconds. It may round up, never down.
        self._held_s = max(1, floor(lease_ttl_s * _HELD))
        self._round_s = min(lease_ttl_s * _ROUND, self._held_s / 3)
        self._until = float("-inf")
        self._claiming = asyncio.Lock()
        self._complaint = ""

    @property
    def left_s(self) -> float:
        """Seconds for which this planner is still the active one; 0: it isn't."""
        return max(0.0, self._until - self._clock())

    @property
    def active(self) -> bool:
        """Whether this planner is the active one."""
        return self.left_s > 0

    async def confirmed(self) -> bool:
        """Whether etcd says now that this planner is the active one."""
        async with self._claiming:
            asked = self._clock()
            was = self.active
            try:
                async with asyncio.timeout(self._held_s / 2):
                    won = await self._claims.claim(JOB, self._who, self._held_s)
            except (ForebayError, TimeoutError) as exc:
                why = str(exc) or "etcd is slow"
                if why != self._complaint:
                    log.warning("no planner can be elected", why=why)
                self._complaint = why
                # What was believed holds until its time is over, but no act rests on it.
                return False
            self._complaint = ""
            self._until = asked + self._held_s if won else float("-inf")
            if self.active != was:
                log.info("this planner is active" if self.active else "another planner is active")
            return self.active

    async def run(self) -> None:
        """Stands for election until cancelled."""
        while True:
            await self.confirmed()
            await asyncio.sleep(self._round_s)

    async def resign(self) -> None:
        """Gives the claim up, so that another takes over at once."""
        self._until = float("-inf")
        try:
            async with self._claiming, asyncio.timeout(self._held_s):
                await self._claims.resign(JOB, self._who)
        except (ForebayError, TimeoutError) as exc:
            log.info("the claim is left to expire", why=str(exc) or "etcd is slow")
