"""Who reads: look-ups, leases on what they found, promotions for them, and how their loads went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.errors import InvalidRequest
from services.common.events.model import Tier
from services.common.telemetry.logging import get_logger
from services.kvbm.core.gate import TierVerdict
from services.kvbm.core.model import LeaseId, ReadyBlock
from services.kvbm.errors import lease_unknown
from services.kvbm.metrics import KvbmMetrics
from services.kvbm.node import Node, check_hash
from services.kvbm.space import Space

MOST_KEYS = 65_536
"""Blocks of one prompt that a look-up takes: a prompt of two million tokens."""
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ask:
    """A look-up; meanings and units as in kvbm.proto's LookupRequest."""

    namespace: bytes
    keys: Sequence[bytes]
    tenant: str = ""
    skip: int = 0
    recompute_block_s: float = 0.0
    wait_s: float = 0.0
    promote_s: float = 0.0
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up found; meanings as in kvbm.proto's LookupResponse."""

    lease: int
    expires_ms: int
    first: int
    ready: Sequence[ReadyBlock]
    promoting: int
    stored: int
    reason: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load went; meanings as in kvbm.proto's LoadReport."""

    lease: int
    blocks: int
    seconds: float
    bad: Sequence[int] = ()


@dataclass(slots=True)
class Held:
    """A lease and the promotions that go on for it."""

    space: Space
    tiers: Sequence[Tier]
    """Of the wanted blocks, the best that each was in."""
    began_s: float
    promotion: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a look-up would do, and why."""

    tiers: Sequence[tuple[Tier, ...]]
    """Of the wanted blocks, as far as they are known to be somewhere."""
    take: int
    """Leading wanted blocks that it would bring."""
    reason: str
    recompute_block_s: float
    verdicts: Mapping[Tier, TierVerdict] = field(default_factory=dict)
    probe_end: int = 0
    """Wanted blocks up to which a probe promotes; 0: no probe."""


class Readers:
    """All leases of a daemon. Loop's thread only."""

    def __init__(self, node: Node, metrics: KvbmMetrics) -> None:
        self._node = node
        self._metrics = metrics
        self._settings = node.settings
        self._held: dict[LeaseId, Held] = {}

    @property
    def leases(self) -> int:
        """Leases held."""
        return len(self._held)

    def plan(self, ask: Ask, *, dry_run: bool = False) -> Plan:
        """What a look-up would do. Raises NotFound."""
        space = self._node.space(ask.namespace)
        keys = ask.keys[ask.skip :]
        tiers = space.catalog.run(keys)
        run = [t[0] for t in tiers]
        recompute = ask.recompute_block_s or (
            space.geometry.block_size / self._settings.recompute_tokens_per_s
        )
        run += [Tier.G4] * self._elsewhere(space, keys[len(run) :], recompute)
        limit_s = self._settings.promote_ms / 1000
        verdict = space.gate.decide(
            run,
            recompute,
            ask.wait_s,
            time.monotonic(),
            limit_s=min(limit_s, ask.promote_s or limit_s),
            dry_run=dry_run,
        )
        take = min(verdict.blocks, ask.limit) if ask.limit else verdict.blocks
        if take == len(keys):
            reason = "end"
        elif take < verdict.blocks:
            reason = "limit"
        else:
            reason = verdict.reason or "missing"
        probe = verdict.probe
        end = probe.first + probe.count if probe is not None else 0
        return Plan(tiers, take, reason, recompute, verdict.tiers, end)

    def _elsewhere(self, space: Space, keys: Sequence[bytes], recompute_block_s: float) -> int:
        """How many of these, which no tier of the node has, to look for in remote storage."""
        if not keys or space.remote is None or not self._may_ask(space):
            return 0
        if space.odds.worth(len(keys) * recompute_block_s):
            # Nobody here knows what other nodes have stored; the gate says whether it would pay.
            return len(keys)
        return space.remote.seen(keys)

    def _may_ask(self, space: Space) -> bool:
        return space.remote is not None and self._node.remote_works

    def lookup(self, ask: Ask) -> Found:
        """Finds, leases, and begins promotions. Errors as in kvbm.proto."""
        began = time.perf_counter()
        _check(ask)
        space, now = self._node.space(ask.namespace), self._node.now_ms()
        plan = self.plan(ask)
        stored = len(space.catalog.run(ask.keys))
        wanted = ask.keys[ask.skip : ask.skip + plan.take]
        space.catalog.touch([*ask.keys[: ask.skip], *wanted], now)
        if plan.reason == "missing" and self._may_ask(space) and space.odds.try_anyway():
            self._promote(space, ask.keys, ask.skip, aside=True)
        elif plan.probe_end:
            self._promote(space, ask.keys[: ask.skip + plan.probe_end], ask.skip, aside=True)
        nothing = Found(0, 0, ask.skip, (), 0, stored, plan.reason)
        if not wanted:
            self._count(ask, plan, began)
            return nothing
        lease_ms = int(self._settings.lease_s * 1000)
        lease = space.catalog.lease(wanted, self._node.tenant(ask.tenant), now + lease_ms, now)
        space.apply()
        promoting = len(wanted) - len(lease.ready)
        known = [tiers[0] for tiers in plan.tiers[: plan.take]]
        sources = known + [Tier.G4] * (len(wanted) - len(known))
        held = self._held[lease.id] = Held(space, sources, time.monotonic())
        if promoting:
            keys = ask.keys[: ask.skip + plan.take]
            first = ask.skip + len(lease.ready)
            held.promotion = self._promote(space, keys, first, lease.id)
        self._metrics.count("matched_tokens", len(lease.ready) * space.geometry.block_size)
        self._count(ask, plan, began)
        return Found(lease.id, lease_ms, ask.skip, lease.ready, promoting, stored, plan.reason)

    def _promote(
        self,
        space: Space,
        keys: Sequence[bytes],
        first: int,
        lease: LeaseId | None = None,
        *,
        aside: bool = False,
    ) -> asyncio.Task[None]:
        """Promotes in the background; for a lease, which then holds what has come.

        `aside`: off any request's path, to measure or to find out.
        """
        moves = self._node.moves[space.namespace]

        def hold() -> None:
            if lease is not None and space.catalog.has_lease(lease):
                space.catalog.lease_ready(lease)
                space.apply()

        async def work() -> None:
            moved = await moves.promote(keys, first, hold)
            if not aside:
                self._metrics.count("onboard_blocks_d2d", moved.disk)
                self._metrics.count("onboard_blocks_o2d", moved.remote)
            if lease is not None:
                tokens = (moved.disk + moved.remote) * space.geometry.block_size
                self._metrics.count("matched_tokens", tokens)

        return space.background(work(), "promotion")

    def _count(self, ask: Ask, plan: Plan, began: float) -> None:
        found: dict[Tier, int] = {}
        for tiers in plan.tiers:
            found[tiers[0]] = found.get(tiers[0], 0) + 1
        seconds = time.perf_counter() - began
        self._metrics.looked_up(len(ask.keys) - ask.skip, found, plan.reason, seconds)
        for tier, verdict in plan.verdicts.items():
            self._metrics.gate(tier, not verdict.refused)

    async def wait(self, lease: int, wait_s: float) -> tuple[list[ReadyBlock], int]:
        """Blocks of a lease in G2 after its promotions, or after `wait_s`; how many are to come."""
        held = self._held.get(LeaseId(lease))
        if held is None:
            raise lease_unknown(lease)
        if held.promotion is not None and wait_s > 0:
            limit_s = self._settings.promote_ms / 1000
            await asyncio.wait({held.promotion}, timeout=min(wait_s, limit_s))
        try:
            ready = held.space.catalog.lease_ready(LeaseId(lease))
        except KeyError:
            self._held.pop(LeaseId(lease), None)
            raise lease_unknown(lease) from None
        held.space.apply()
        running = held.promotion is not None and not held.promotion.done()
        return ready, len(held.tiers) - len(ready) if running else 0

    def release(self, reports: Sequence[Loaded]) -> int:
        """Ends leases and learns from how their loads went; how many were known."""
        known = 0
        for report in reports:
            lease = LeaseId(report.lease)
            held = self._held.pop(lease, None)
            if held is None:
                continue
            space = held.space
            if report.bad:
                self._suspect(space, lease, report.bad)
            if held.promotion is not None and not held.promotion.done():
                self._given_up(held, lease)
            known += space.catalog.release(lease, self._node.now_ms())
            space.apply()
            if report.blocks:
                self._metrics.count("onboard_blocks_h2d", report.blocks)
                size = report.blocks * space.geometry.payload_bytes
                self._metrics.moved(Tier.G2, Tier.G1, size, report.seconds)
                space.gate.observe(Tier.G2, report.blocks, report.seconds, time.monotonic())
        self._metrics.lease_ended("released", known)
        return known

    def _given_up(self, held: Held, lease: LeaseId) -> None:
        """A request waits no longer for blocks that have not come."""
        try:
            ready = len(held.space.catalog.lease_ready(lease))
        except KeyError:
            return
        late = set(held.tiers[ready:])
        if len(late) == 1:  # of several, nobody knows which is slow
            (tier,) = late
            came, now_s = held.tiers[:ready].count(tier), time.monotonic()
            held.space.gate.given_up(tier, came + 1, now_s - held.began_s, now_s)

    def _suspect(self, space: Space, lease: LeaseId, bad: Sequence[int]) -> None:
        """Looks itself at what an engine found bad: the arena may be at fault, or the engine."""
        try:
            ready = space.catalog.lease_ready(lease)
        except KeyError:
            return
        for number in bad:
            self._metrics.failed(Tier.G2, "verification")
            if number < len(ready):
                space.background(self._judge(space, ready[number]), "judge")

    async def _judge(self, space: Space, block: ReadyBlock) -> None:
        await verify(self._node, space, block)

    def prefetch(self, namespace: bytes, keys: Sequence[bytes], short: Sequence[int]) -> int:
        """Begins promotions that a look-up would begin; how many blocks."""
        space = self._node.space(namespace)
        if not keys:
            keys = space.long_keys(short[:MOST_KEYS])
        ask = Ask(namespace, keys)
        _check(ask)
        plan = self.plan(ask, dry_run=True)
        below = [t for t in plan.tiers[: plan.take] if Tier.G2 not in t]
        if below:
            self._promote(space, keys[: plan.take], 0)
        return len(below)

    def expire(self) -> None:
        """Lets leases and blocks end whose time has come."""
        for space in self._node.spaces.values():
            expired = space.catalog.expire(self._node.now_ms())
            space.apply()
            self._metrics.lease_ended("expired", expired.leases)
        for lease, held in list(self._held.items()):
            if not held.space.catalog.has_lease(lease):
                del self._held[lease]


async def verify(node: Node, space: Space, block: ReadyBlock) -> bool:
    """Whether a block in memory is what it should be; a bad one is forgotten."""
    slot = block.ref.index
    sums = await asyncio.to_thread(space.arena.checksums, slot)
    if space.catalog.slot(Tier.G2, block.key) != block.ref:
        return True  # it has gone meanwhile: what was read was another's
    # As engines look at it: whole and SEALED. A sound header that says less is as bad as none.
    good = space.arena.holds(slot, block.ref.generation, block.key)
    if good and tuple(sums) == tuple(block.checksums):
        return True
    log.error("a block in memory is corrupt", slot=slot, key=block.key.hex()[:16])
    node.metrics.corrupt(Tier.G2)
    space.catalog.forget(Tier.G2, block.key, node.now_ms(), quarantine=True)
    space.apply()
    return False


def _check(ask: Ask) -> None:
    check_hash(ask.namespace, "namespace")
    if len(ask.keys) > MOST_KEYS:
        raise InvalidRequest(f"more than {MOST_KEYS} blocks in one prompt", field="keys")
    for key in ask.keys:
        check_hash(key, "keys")
    if ask.skip > len(ask.keys):
        raise InvalidRequest("skips more blocks than there are", field="skip_blocks")
