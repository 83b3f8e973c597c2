"""Keeps remote storage tidy: expired objects and dead namespaces go, by the hand of one node.

Every node says which namespaces it uses and renews the objects that it used; whoever is elected
deletes the rest. All ages are by the store's own clock, and two janitors at once do no harm: they
delete the same things.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.common.discovery import Discovery
from services.common.etcd.config import EtcdRefused, EtcdUnavailable
from services.common.telemetry.logging import get_logger
from services.kvbm.movers.directory import PART
from services.kvbm.movers.objects import Objects, StoreError
from services.kvbm.tiers.object import RemoteTier

log = get_logger(__name__)
_TICK_S = 60.0
_TOUCH_S = 600.0
_SWEEP_S = 3600.0
_DEAD_S = 7 * 86400.0
_LEFTOVER_S = 3600.0
_REQUEST_S = 30.0
_RENEWED = 64
_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_MARKERS = "alive"
_LEASE = "janitor/lease"


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep has deleted."""

    expired: int = 0
    dead: int = 0
    """Objects of dead namespaces."""
    namespaces: int = 0


class Janitor:
    """One node's part. Loop's thread only."""

    def __init__(
        self,
        tier: RemoteTier,
        node: str,
        elect: Callable[[float], Awaitable[bool]],
        *,
        dead_s: float = _DEAD_S,
    ) -> None:
        """`elect`: given the store's time, whether this node is the one that sweeps."""
        self._tier = tier
        self._objects = tier.objects
        self._node = node
        self._elect = elect
        self._dead_s = dead_s

    async def run(self) -> None:
        """Goes on until cancelled."""
        touch_at = sweep_at = 0.0
        touched: set[bytes] = set()
        # What is used shall be written again well before its time is over.
        ttl_s = self._tier.ttl_s or float("inf")
        tick_s, touch_s, sweep_s = (min(s, ttl_s / 4) for s in (_TICK_S, _TOUCH_S, _SWEEP_S))
        while True:
            now = time.monotonic()
            used = set(self._tier.namespaces)
            try:
                if used and self._tier.health.ok and (now >= touch_at or used - touched):
                    store_now = await self.touch()
                    touch_at, touched = now + touch_s, used
                    await self.renew(store_now)
                    if now >= sweep_at and await self._elect(store_now):
                        await self.sweep(store_now)
                        # Spread, so that not always the same node comes first.
                        sweep_at = now + sweep_s * random.uniform(0.9, 1.1)
            except StoreError as exc:
                log.info("remote storage was not tidied", place=self._tier.place, why=str(exc))
            except Exception:  # a loop's boundary: the next round tries again
                log.exception("remote storage was not tidied")
            await asyncio.sleep(tick_s)

    async def touch(self) -> float:
        """Marks the namespaces in use here as alive; the store's time."""
        now = 0.0
        for namespace in self._tier.namespaces:
            key = f"{_MARKERS}/{namespace.hex()}"
            await self._objects.write(key, self._node.encode(), _REQUEST_S)
            if (entry := await self._objects.size(key, _REQUEST_S)) is not None:
                now = max(now, entry.modified_s)
        return now

    async def renew(self, now: float) -> int:
        """Writes objects again that were used and are in the second half of their time."""
        ttl_s, renewed = self._tier.ttl_s, 0
        for name in self._tier.take_used():
            entry = await self._objects.size(name, _REQUEST_S)
            if entry is None or now - entry.modified_s < ttl_s / 2 or renewed >= _RENEWED:
                continue
            data = await self._objects.read(name, _REQUEST_S)
            if data is not None:
                await self._objects.write(name, data, _REQUEST_S)
                renewed += 1
        return renewed

    async def sweep(self, now: float) -> Swept:
        """Deletes what is expired, dead or left over."""
        markers: dict[str, float] = {}
        async for batch in self._objects.entries(_MARKERS, _REQUEST_S):
            markers |= {entry.key.rpartition("/")[2]: entry.modified_s for entry in batch}
        expired = dead = namespaces = 0
        for folder in await self._objects.folders(_REQUEST_S):
            if _NAMESPACE.fullmatch(folder):
                alive = now - markers.get(folder, 0.0) < self._dead_s
                gone, newest = await self._expire(folder, now)
                expired += gone
                if not alive and now - newest >= self._dead_s:
                    dead += await self._delete_all(folder)
                    await self._objects.delete([f"{_MARKERS}/{folder}"], _REQUEST_S)
                    namespaces += 1
            elif folder == "probe":
                await self._expire(folder, now, after_s=_LEFTOVER_S)
        if expired or dead:
            log.info(
                "remote storage tidied",
                place=self._tier.place,
                expired=expired,
                dead_objects=dead,
                dead_namespaces=namespaces,
            )
        return Swept(expired, dead, namespaces)

    async def _expire(
        self, folder: str, now: float, *, after_s: float | None = None
    ) -> tuple[int, float]:
        """Deletes what is too old; how many, and when the newest one was written."""
        after_s = after_s or self._tier.ttl_s or float("inf")
        gone, newest = 0, 0.0
        async for batch in self._objects.entries(folder, _REQUEST_S):
            newest = max([newest, *(entry.modified_s for entry in batch)])
            old = [
                entry.key
                for entry in batch
                if now - entry.modified_s
                > (min(after_s, _LEFTOVER_S) if entry.key.endswith(PART) else after_s)
            ]
            if old:
                await self._objects.delete(old, _REQUEST_S)
                gone += len(old)
        return gone, newest

    async def _delete_all(self, folder: str) -> int:
        gone = 0
        async for batch in self._objects.entries(folder, _REQUEST_S):
            await self._objects.delete([entry.key for entry in batch], _REQUEST_S)
            gone += len(batch)
        return gone


async def elect_by_store(objects: Objects, node: str, now: float, ttl_s: float) -> bool:
    """Whether this node has, or now takes, the lease object; it is void `ttl_s` after its write."""
    mine = node.encode()
    entry = await objects.size(_LEASE, _REQUEST_S)
    if entry is None:
        return await objects.write(_LEASE, mine, _REQUEST_S, absent=True)
    if now - entry.modified_s < ttl_s and await objects.read(_LEASE, _REQUEST_S) != mine:
        return False
    await objects.write(_LEASE, mine, _REQUEST_S)
    return await objects.read(_LEASE, _REQUEST_S) == mine


def elector(
    tier: RemoteTier, node: str, discovery: Discovery | None, ttl_s: float = 2 * _SWEEP_S
) -> Callable[[float], Awaitable[bool]]:
    """Elects by etcd; without one, or while it doesn't answer, by an object in the store."""
    job = f"janitor/{hashlib.sha256(tier.place.encode()).hexdigest()[:16]}"

    async def elect(now: float) -> bool:
        if discovery is not None:
            try:
                return await discovery.claim(job, node, ttl_s)
            except (EtcdUnavailable, EtcdRefused) as exc:
                log.info("etcd elects no janitor; the store does", why=exc.message)
        return await elect_by_store(tier.objects, node, now, ttl_s)

    return elect


async def run_janitor(tier: RemoteTier, node: str, discovery: Discovery | None = None) -> None:
    """This node's part in keeping remote storage tidy, until cancelled. `node`: unique."""
    await Janitor(tier, node, elector(tier, node, discovery)).run()
