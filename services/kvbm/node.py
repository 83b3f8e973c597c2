"""The node's daemon: its namespaces, the engines attached to them, and what they ask.

Everything runs on the loop's thread; what takes time (I/O, checksums, memory to be allocated) runs
elsewhere and comes back as an event of the catalogs.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.common.arena import Arena, ArenaError, Geometry
from services.common.errors import InvalidRequest
from services.common.events.model import Event, Tier
from services.common.telemetry.logging import get_logger
from services.kvbm.config import KvbmSettings
from services.kvbm.core.catalog import Catalog
from services.kvbm.core.eviction import new_eviction
from services.kvbm.core.gate import Gate
from services.kvbm.core.model import (
    Adopted,
    BlockMeta,
    CommitResult,
    LeaseId,
    Owner,
    SlotRef,
    tenant_id,
)
from services.kvbm.core.offload import OffloadPlan, WriteBudget
from services.kvbm.core.peers import PeerId
from services.kvbm.core.quota import QuotaBook
from services.kvbm.errors import (
    geometry_mismatch,
    namespace_unknown,
    no_room,
    not_attached,
    not_locked,
)
from services.kvbm.fetching import Fetches
from services.kvbm.metrics import KvbmMetrics
from services.kvbm.moves import Moves
from services.kvbm.owners import Owners
from services.kvbm.space import Space
from services.kvbm.tiers.host import GeometryMismatch, HostTier
from services.kvbm.tiers.peer import Peers
from services.kvbm.tiers.port import DiskSpace, DiskTier, Health, ObjectTier

_GRANT_SHARE = 0.125
"""Most of a memory that its first engine may hold empty; the next half of that, a third, and so on.
With one engine or ten, blocks keep two thirds of it or more."""
HASH_BYTES = 32
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Filled:
    """A slot that an engine has filled, or gives back (no block)."""

    ref: SlotRef
    block: BlockMeta | None
    checksum: int = 0


@dataclass(slots=True)
class Attached:
    """An engine, or one rank of it."""

    owner: Owner
    space: Space
    worker: str
    rank: int


class Node:
    """All of a daemon but its wire. Use `open_node` of app.py."""

    def __init__(
        self,
        id: str,
        incarnation: int,
        settings: KvbmSettings,
        host: HostTier,
        owners: Owners,
        disk: DiskTier | None,
        remote: ObjectTier | None,
        publish: Callable[[Sequence[Event]], int],
        metrics: KvbmMetrics,
        peers: Peers | None = None,
    ) -> None:
        self.id = id
        self.incarnation = incarnation
        self.settings = settings
        self.host = host
        self.disk = disk
        self.remote = remote
        self.peers = peers
        self.metrics = metrics
        self.spaces: dict[bytes, Space] = {}
        self.moves: dict[bytes, Moves] = {}
        self.attached: dict[Owner, Attached] = {}
        self.adopted_blocks = 0
        self.tenants: dict[int, str] = {}
        """Names of tenants that were heard of, by number."""
        self.quota = QuotaBook(_limits(settings.quotas))
        for name in settings.quotas:
            self.tenant("" if name == "*" else name)
        self.disk_budget = WriteBudget(settings.disk_write_mb_s * 2**20)
        self._owners = owners
        self._publish = publish
        self._opening = asyncio.Lock()
        if peers is not None:
            peers.changed.append(self._peer_changed)
        self._without_disk: dict[bytes, str] = {}
        """Namespaces for which the disk has no room at present, and why."""

    # Start.

    async def adopt(self) -> None:
        """Takes over what earlier lives of the daemon have left in memory and on disk."""
        for arena in await self.host.adopt():
            try:
                await self._add(arena)
            except OSError as exc:
                log.warning("an arena can't be used", arena=str(arena.path), why=str(exc))

    async def _add(self, arena: Arena) -> Space:
        settings = self.settings
        disk = await self.open_disk(arena)
        remote = await self.remote.open(arena.namespace, arena) if self.remote else None
        slots = {Tier.G2: arena.slots, Tier.G3: disk.slots if disk else 0}
        capacity_g3 = max(slots[Tier.G3], settings.g3_bytes // arena.geometry.stride, 1)
        evictions = {Tier.G2: new_eviction(arena.slots), Tier.G3: new_eviction(capacity_g3)}
        catalog = Catalog(
            slots,
            arena.geometry.ranks,
            arena.geometry.payload_bytes,
            evictions,
            self.quota,
            grant_limit=settings.grant_blocks,
            grant_share=_GRANT_SHARE,
            new_lease=lambda: LeaseId(secrets.randbits(63) or 1),
            pin_share=settings.pin_share,
        )
        space = Space(
            arena,
            catalog,
            Gate(mode=settings.gate),
            OffloadPlan(evictions, self.disk_budget, arena.geometry.payload_bytes),
            disk,
            remote,
            self._publish,
            self.metrics,
        )
        began = time.monotonic()
        counts = await space.adopt(self.now_ms(), self._owners.locked)
        adopted = counts.get(Adopted.ADOPTED, 0)
        self.adopted_blocks += adopted
        log.info(
            "blocks taken over",
            namespace=arena.namespace.hex()[:16],
            arena_gib=round(arena.size(arena.geometry, arena.slots) / 2**30, 3),
            seconds=round(time.monotonic() - began, 3),
            **{result.value: n for result, n in sorted(counts.items())},
        )
        self.spaces[arena.namespace] = space
        self.moves[arena.namespace] = Moves(
            space,
            self.metrics,
            self.now_ms,
            time.monotonic,
            disk_timeout_s=settings.disk_timeout_s,
            remote_timeout_s=settings.remote_timeout_s,
            fetches=self._fetches(space),
        )
        return space

    def _fetches(self, space: Space) -> Fetches | None:
        if self.peers is None:
            return None
        return Fetches(space, self.peers, self.metrics, self.now_ms)

    def _peer_changed(self, peer: PeerId) -> None:
        for space in self.spaces.values():
            space.gate.forget(peer)

    async def open_disk(self, arena: Arena) -> DiskSpace | None:
        """The namespace's part of the disk; None: there is no disk, or no room on it now."""
        if self.disk is None:
            return None
        try:
            # Blocks of models that nobody serves any more make room, one after the other.
            old = [n.namespace for n in await self.disk.namespaces()]
            while True:
                try:
                    opened = await self.disk.open(arena.namespace, arena)
                    self._without_disk.pop(arena.namespace, None)
                    return opened
                except OSError:
                    if not (old := [n for n in old if n not in self.spaces]):
                        raise
                    await self.disk.remove(old.pop(0))
        except OSError as exc:
            if arena.namespace not in self._without_disk:
                log.warning("this namespace has no room on disk", why=str(exc))
            self._without_disk[arena.namespace] = exc.strerror or str(exc)
            return None

    # Engines.

    async def attach(
        self,
        namespace: bytes,
        geometry: Geometry,
        rank: int,
        worker: str,
        *,
        former: int = 0,
        g1_bytes: int = 0,
        model: str = "",
    ) -> tuple[Attached, str, str]:
        """A new attachment, the path of its lock and of its arena. Errors as in kvbm.proto."""
        check_hash(namespace, "namespace")
        if not 0 <= rank < geometry.ranks:
            raise InvalidRequest(f"rank {rank} is not below {geometry.ranks}", field="rank")
        async with self._opening:
            space = self.spaces.get(namespace)
            if space is None:
                space = await self._open(namespace, geometry)
                self._advise(space, g1_bytes)
        if space.geometry != geometry:
            raise geometry_mismatch(_words(space.geometry), _words(geometry))
        space.model = model or space.model
        if former:
            self.release_owner(Owner(former))
        number, lock = self._owners.new()
        attached = Attached(Owner(number), space, worker, rank)
        self.attached[attached.owner] = attached
        log.info("engine attached", worker=worker, rank=rank, owner=f"{number:016x}", model=model)
        return attached, str(lock), str(space.arena.path)

    async def _open(self, namespace: bytes, geometry: Geometry) -> Space:
        try:
            arena = await self.host.open(namespace, geometry, self._in_use, self._drop)
        except GeometryMismatch as exc:
            raise geometry_mismatch(str(exc), _words(geometry)) from exc
        except ArenaError as exc:
            raise no_room(exc.strerror or str(exc)) from exc
        return await self._add(arena)

    def _in_use(self, namespace: bytes) -> bool:
        return any(a.space.namespace == namespace for a in self.attached.values())

    async def _drop(self, namespace: bytes) -> None:
        space = self.spaces.pop(namespace)
        self.moves.pop(namespace)
        self._without_disk.pop(namespace, None)
        space.announce_end()
        if self.peers is not None:
            await self.peers.forget(namespace)
        await space.close()

    def _advise(self, space: Space, g1_bytes: int) -> None:
        """Warns of tiers smaller than the one above: what leaves that finds no room below."""
        g2 = space.arena.slots * space.geometry.payload_bytes
        if g1_bytes and g2 < g1_bytes:
            log.warning(
                "G2 is smaller than the engine's own cache: it adds little; raise cpu_cache_gb",
                g1_gib=round(g1_bytes / 2**30, 2),
                g2_gib=round(g2 / 2**30, 2),
            )
        if self.disk is not None and self.settings.g3_bytes < self.settings.g2_bytes:
            log.warning(
                "G3 is smaller than G2: it adds little; raise disk_cache_gb",
                g2_gib=round(self.settings.g2_bytes / 2**30, 2),
                g3_gib=round(self.settings.g3_bytes / 2**30, 2),
            )

    def detach(self, owner: Owner) -> None:
        """Ends an attachment; its writes have ended."""
        attached = self.attached.get(owner)
        if attached is not None:
            log.info("engine detached", worker=attached.worker, owner=f"{owner:016x}")
        self.release_owner(owner)

    def release_owner(self, owner: Owner) -> int:
        """Takes back all slots of an owner who can't write any more; how many."""
        self.attached.pop(owner, None)
        freed = 0
        for space in self.spaces.values():
            freed += space.catalog.release_owner(owner, self.now_ms())
            space.apply()
        self._owners.forget(owner)
        return freed

    def bury_dead(self) -> None:
        """Takes back the slots of engines that have died, of this life and of former ones."""
        for owner in {*self.attached, *(Owner(o) for o in self._owners.known())}:
            if self._owners.dead(owner):
                attached = self.attached.get(owner)
                freed = self.release_owner(owner)
                log.warning(
                    "engine died",
                    worker=attached.worker if attached else "",
                    owner=f"{owner:016x}",
                    slots_taken_back=freed,
                )

    def _owner(self, owner: int) -> Attached:
        attached = self.attached.get(Owner(owner))
        if attached is None:
            raise not_attached(owner)
        if not self._owners.locked(owner):
            raise not_locked(owner)
        return attached

    def grant(self, owner: int, count: int) -> list[SlotRef]:
        """Empty slots to fill."""
        attached = self._owner(owner)
        slots = attached.space.catalog.grant(attached.owner, count, self.now_ms())
        attached.space.apply()
        return slots

    def commit(
        self, owner: int, filled: Sequence[Filled], grant: int
    ) -> tuple[list[CommitResult], list[SlotRef]]:
        """Books filled slots; their results in order, and new slots."""
        attached = self._owner(owner)
        catalog, now = attached.space.catalog, self.now_ms()
        results = []
        for one in filled:
            if one.block is None:
                result = catalog.give_back(attached.owner, one.ref, now)
            else:
                result = catalog.commit(
                    attached.owner, one.ref, attached.rank, one.block, one.checksum, now
                )
            results.append(result)
            self.metrics.committed(result.value)
        self.metrics.count("offload_blocks_d2h", results.count(CommitResult.STORED))
        slots = catalog.grant(attached.owner, grant, now) if grant else []
        attached.space.apply()
        return results, slots

    def block(self, key: bytes, parent: bytes, position: int, tenant: str) -> BlockMeta:
        """What a committed block is, with its times. Raises InvalidRequest."""
        check_hash(key, "key")
        if parent:
            check_hash(parent, "parent")
        now = self.now_ms()
        ttl_ms = int(self.settings.ttl_s * 1000)
        return BlockMeta(
            key,
            parent or bytes(HASH_BYTES),
            position,
            self.tenant(tenant),
            (),
            now,
            now + ttl_ms if ttl_ms else 0,
        )

    def tenant(self, name: str) -> int:
        """A tenant's number; its name is remembered for people."""
        number = tenant_id(name)
        if number and len(self.tenants) < 10_000:
            self.tenants[number] = name
        return number

    @staticmethod
    def now_ms() -> int:
        """Unix time in milliseconds, as it stands in headers."""
        return time.time_ns() // 1_000_000

    def totals(self) -> dict[Tier, tuple[int, int, int, Health]]:
        """By tier: blocks, their bytes, the bytes it may store (0: no cap of ours), its health."""
        healths = {Tier.G2: Health(True)}
        caps = {Tier.G2: self.settings.g2_bytes, Tier.G3: self.settings.g3_bytes, Tier.G4: 0}
        if self.disk is not None:
            healths[Tier.G3] = self.disk.health
            if self.disk.health.ok and self._without_disk:
                healths[Tier.G3] = Health(False, next(iter(self._without_disk.values())))
        if self.remote is not None:
            healths[Tier.G4] = self.remote.health
        totals = {}
        for tier, health in healths.items():
            blocks = used = 0
            for space in self.spaces.values():
                n = space.count(tier).blocks
                blocks, used = blocks + n, used + n * space.geometry.payload_bytes
            totals[tier] = (blocks, used, caps[tier], health)
        return totals

    def space(self, namespace: bytes) -> Space:
        """A namespace. Raises NotFound."""
        space = self.spaces.get(namespace)
        if space is None:
            raise namespace_unknown(namespace)
        return space

    @property
    def remote_works(self) -> bool:
        """Whether remote storage answers at present."""
        return self.remote is not None and self.remote.health.ok

    async def close(self) -> None:
        """Lets what moves end; all blocks stay for the next daemon."""
        if self.peers is not None:
            # First: a read that is cut off has its end before its arena's.
            await self.peers.close()
        for space in self.spaces.values():
            await space.close()


def check_hash(value: bytes, field: str) -> None:
    """Raises InvalidRequest, naming the field, for what is no 32-byte digest."""
    if len(value) != HASH_BYTES:
        raise InvalidRequest(f"must be {HASH_BYTES} bytes, not {len(value)}", field=field)


def _words(geometry: Geometry) -> str:
    return (
        f"{geometry.block_size} tokens, {geometry.shard_bytes} bytes x {geometry.ranks} ranks, "
        f"{geometry.layout}"
    )


def _limits(quotas: Mapping[str, Mapping[str, float]]) -> dict[tuple[int | None, Tier], int]:
    return {
        (None if name == "*" else tenant_id(name), Tier[tier.upper()]): int(gib * 2**30)
        for name, tiers in quotas.items()
        for tier, gib in tiers.items()
    }
