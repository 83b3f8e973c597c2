"""Who reads: look-ups, leases on what they found, promotions for them, and how their loads went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from services.common.blocks import block_key
from services.common.errors import InvalidRequest
from services.common.events.model import Tier
from services.common.telemetry.logging import get_logger
from services.kvbm.core.gate import Source, TierVerdict
from services.kvbm.core.model import LeaseId, ReadyBlock
from services.kvbm.core.peers import PeerId
from services.kvbm.errors import lease_unknown
from services.kvbm.fetching import Wanted
from services.kvbm.metrics import KvbmMetrics
from services.kvbm.node import Node, check_hash
from services.kvbm.space import Space

MOST_KEYS = 65_536
"""Blocks of one prompt that a look-up takes: a prompt of two million tokens."""
MOST_HINTS = 64
"""Peers that a request may name."""
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Hint:
    """A peer that is said to hold some of a request's blocks; as in kvbm.proto's PeerHint."""

    peer: PeerId
    first: int
    count: int


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
    peers: Sequence[Hint] = ()


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
    sources: Sequence[Source]
    """Of the wanted blocks, what each was to come from."""
    began_s: float
    promotion: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a look-up would do, and why."""

    run: Sequence[Source]
    """Of the wanted blocks, what each would come from, up to the first that is nowhere."""
    take: int
    """Leading wanted blocks that it would bring."""
    reason: str
    recompute_block_s: float
    verdicts: Mapping[Source, TierVerdict] = field(default_factory=dict)
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
        self._hear(space, [block_key(key) for key in ask.keys] if ask.peers else (), ask.peers)
        keys = ask.keys[ask.skip :]
        recompute = ask.recompute_block_s or self._recompute_block_s(space)
        run = self._known(space, keys)
        run += self._elsewhere(space, keys[len(run) :], recompute)
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
        return Plan(run, take, reason, recompute, verdict.tiers, end)

    def _recompute_block_s(self, space: Space) -> float:
        return space.geometry.block_size / self._settings.recompute_tokens_per_s

    def _known(self, space: Space, keys: Sequence[bytes]) -> list[Source]:
        """What leading blocks would come from: the node's tiers, or peers that have them."""
        run: list[Source] = [tiers[0] for tiers in space.catalog.run(keys)]
        fetches = self._node.moves[space.namespace].fetches
        if fetches is None:
            return run
        # Memory of a peer is nearer than remote storage.
        while run and run[-1] is Tier.G4:
            run.pop()
        while len(run) < len(keys):
            peer = fetches.holder(block_key(keys[len(run)]))
            tiers = space.catalog.tiers_of(keys[len(run)])
            if tiers and (peer is None or tiers[0] is not Tier.G4):
                run.append(tiers[0])
            elif peer is not None:
                run.append(peer)
            else:
                break
        return run

    def _elsewhere(
        self, space: Space, keys: Sequence[bytes], recompute_block_s: float
    ) -> list[Source]:
        """From where to try to bring these, which nobody is known to have; as many as to try."""
        if not keys:
            return []
        gain_s = len(keys) * recompute_block_s
        fetches = self._node.moves[space.namespace].fetches
        if (
            fetches is not None
            and fetches.odds.worth(gain_s)
            and fetches.may_ask(block_key(keys[0]))
        ):
            return [Tier.PEER] * len(keys)
        if space.remote is None or not self._may_ask(space):
            return []
        if space.odds.worth(gain_s):
            # Nobody here knows what other nodes have stored; the gate says whether it would pay.
            return [Tier.G4] * len(keys)
        return [Tier.G4] * space.remote.seen(keys)

    def _hear(self, space: Space, short: Sequence[int], hints: Sequence[Hint]) -> None:
        """Takes in who is said to hold what."""
        peers = self._node.peers
        if peers is None:
            return
        for hint in hints[:MOST_HINTS]:
            part = short[hint.first : hint.first + hint.count]
            peers.book.hint(hint.peer, part, time.monotonic())

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
        if plan.reason == "missing" and self._try_anyway(space, ask.keys[ask.skip + plan.take :]):
            self._promote(space, ask.keys, ask.skip, aside=True, ask=self._asking(space, plan, ask))
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
        sources = plan.run[: plan.take]
        held = self._held[lease.id] = Held(space, sources, time.monotonic())
        if promoting:
            keys = ask.keys[: ask.skip + plan.take]
            first = ask.skip + len(lease.ready)
            asking = self._asking(space, plan, ask) if Tier.PEER in sources else None
            held.promotion = self._promote(space, keys, first, lease.id, ask=asking)
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
        ask: Callable[[PeerId, int], int] | None = None,
    ) -> asyncio.Task[None]:
        """Promotes in the background; for a lease, which then holds what has come.

        `aside`: off any request's path, to measure or to find out. `ask`: see Moves.promote.
        """
        moves = self._node.moves[space.namespace]

        def hold() -> None:
            if lease is not None and space.catalog.has_lease(lease):
                space.catalog.lease_ready(lease)
                space.apply()

        async def work() -> None:
            moved = await moves.promote(keys, first, hold, ask)
            if not aside:
                self._metrics.count("onboard_blocks_d2d", moved.disk)
                self._metrics.count("onboard_blocks_o2d", moved.remote)
            if lease is not None:
                blocks = moved.disk + moved.remote + moved.peers
                tokens = blocks * space.geometry.block_size
                self._metrics.count("matched_tokens", tokens)

        return space.background(work(), "promotion")

    def _try_anyway(self, space: Space, keys: Sequence[bytes]) -> bool:
        """Whether to look for these where it doesn't seem to be worth it, off the path."""
        fetches = self._node.moves[space.namespace].fetches
        peers = (
            fetches is not None
            and bool(keys)
            and fetches.may_ask(block_key(keys[0]))
            and fetches.odds.try_anyway()
        )
        return (self._may_ask(space) and space.odds.try_anyway()) or peers

    def _asking(self, space: Space, plan: Plan, ask: Ask) -> Callable[[PeerId, int], int]:
        """How many blocks to fetch of those that a peer turns out to hold."""

        def worth(peer: PeerId, held: int) -> int:
            limit_s = self._settings.promote_ms / 1000
            run: list[Source] = [peer] * held
            return space.gate.decide(
                run,
                plan.recompute_block_s,
                ask.wait_s,
                time.monotonic(),
                limit_s=min(limit_s, ask.promote_s or limit_s),
            ).blocks

        return worth

    def _count(self, ask: Ask, plan: Plan, began: float) -> None:
        found: dict[Source, int] = {}
        for source in plan.run:
            found[source] = found.get(source, 0) + 1
        seconds = time.perf_counter() - began
        self._metrics.looked_up(len(ask.keys) - ask.skip, found, plan.reason, seconds)
        for source, verdict in plan.verdicts.items():
            # All peers count as one: their number has no bound.
            tier = source if isinstance(source, Tier) else Tier.PEER
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
        return ready, len(held.sources) - len(ready) if running else 0

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
        late = set(held.sources[ready:])
        if len(late) == 1:  # of several, nobody knows which is slow
            (source,) = late
            came, now_s = held.sources[:ready].count(source), time.monotonic()
            held.space.gate.given_up(source, came + 1, now_s - held.began_s, now_s)

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

    def suspect(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Looks itself at what a peer found bad: this node's memory may be at fault, or the way."""
        space = self._node.spaces.get(namespace)
        for key in keys[:MOST_HINTS] if space is not None else ():
            assert space is not None
            meta, ref = space.catalog.meta(key, Tier.G2), space.catalog.slot(Tier.G2, key)
            if meta is not None and ref is not None:
                space.background(self._judge(space, ReadyBlock(key, ref, meta.checksums)), "judge")

    async def _judge(self, space: Space, block: ReadyBlock) -> None:
        await verify(self._node, space, block)

    def prefetch(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        short: Sequence[int],
        hints: Sequence[Hint] = (),
        recompute_block_s: float = 0.0,
    ) -> int:
        """Begins promotions that a look-up would begin; how many blocks."""
        space = self._node.space(namespace)
        _check(Ask(namespace, keys))
        short = [block_key(key) for key in keys] or short[:MOST_KEYS]
        self._hear(space, short, hints)
        run = self._known_short(space, short)
        take = space.gate.decide(
            run,
            recompute_block_s or self._recompute_block_s(space),
            0.0,
            time.monotonic(),
            limit_s=self._settings.promote_ms / 1000,
            dry_run=True,
        ).blocks
        at = below = 0
        fetches = self._node.moves[namespace].fetches
        for source, group in groupby(run[:take]):
            part = short[at : (at := at + sum(1 for _ in group))]
            if isinstance(source, Tier):
                if source is not Tier.G2:
                    first = at - len(part)
                    chain = keys[:at] or space.long_keys(part)
                    self._promote(space, chain, first if keys else 0)
                    below += len(part)
            elif fetches is not None:
                missing = [key for key in part if fetches.coming(key) is None]
                if missing == part:
                    fetch = fetches.fetch(source, Wanted(part, keys[at - len(part) : at]))
                    space.background(_awaited(fetch), "prefetch")
                below += len(missing)
        return below

    def _known_short(self, space: Space, short: Sequence[int]) -> list[Source]:
        """As `_known`, of blocks whose full hashes may not be known here."""
        fetches = self._node.moves[space.namespace].fetches
        run: list[Source] = []
        for number in short:
            key = space.long_key(number)
            tiers = space.catalog.tiers_of(key) if key is not None else ()
            peer = fetches.holder(number) if fetches is not None else None
            if tiers and (peer is None or tiers[0] is not Tier.G4):
                run.append(tiers[0])
            elif peer is not None:
                run.append(peer)
            else:
                break
        return run

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


async def _awaited(work: Awaitable[int]) -> None:
    await work


def _check(ask: Ask) -> None:
    check_hash(ask.namespace, "namespace")
    if len(ask.keys) > MOST_KEYS:
        raise InvalidRequest(f"more than {MOST_KEYS} blocks in one prompt", field="keys")
    for key in ask.keys:
        check_hash(key, "keys")
    if ask.skip > len(ask.keys):
        raise InvalidRequest("skips more blocks than there are", field="skip_blocks")
