"""Any order of grants, commits, deaths, leases, copies, clears, pins and restarts, against a model.

The model knows what bytes lie in each slot: every write puts a new stamp there, as engines, the
disk and the daemon's copies would. It is naive: what the catalog evicts it learns from the events,
and judges whether that was allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from services.common.arena import SlotHeader, SlotState
from services.common.events.model import Tier
from services.kvbm.core.catalog import Catalog
from services.kvbm.core.eviction import new_eviction
from services.kvbm.core.model import (
    Adopted,
    BlockMeta,
    CommitResult,
    Copy,
    LeaseId,
    Owner,
    PinLimit,
    Selection,
    SlotRef,
    sealed_header,
)
from tests.support.catalogs import PAYLOAD, Shell, catalog, chain, keys

G2, G3, G4 = Tier.G2, Tier.G3, Tier.G4
OWNERS = [Owner(1), Owner(2), Owner(3)]
GRANT_LIMIT = 3
# Three prompts; two begin alike.
SHARED = chain("a", 5, 1)
BRANCH = [
    *SHARED[:2],
    *(
        replace(meta, parent=SHARED[1].key if meta.position == 2 else meta.parent)
        for meta in chain("b", 4, 1)[2:]
    ),
]
PROMPTS = [SHARED, BRANCH, chain("c", 3, 2)]
BLOCKS = {meta.key: meta for prompt in PROMPTS for meta in prompt}
LIMITS = {(1, G2): 4 * PAYLOAD, (2, G3): PAYLOAD, (1, G4): 3 * PAYLOAD}
Stamp = tuple[bytes, int]
"""What lies in a slot: of which block, and which writing of it."""


@dataclass
class Granted:
    owner: Owner
    ranks: set[int] = field(default_factory=set)
    meta: BlockMeta | None = None
    void: bool = False


@dataclass
class Leased:
    keys: list[bytes]
    expires_ms: int
    owner: Owner | None
    seen: dict[SlotRef, Stamp]


class CatalogMachine(RuleBasedStateMachine):
    @initialize(
        ranks=st.integers(1, 2),
        g2=st.integers(4, 7),
        g3=st.integers(0, 4),
        limited=st.booleans(),
        share=st.sampled_from([0.0, 0.5, 1.0]),
        kind=st.sampled_from(["default", "lru"]),
        prompt=st.sampled_from(PROMPTS),
    )
    def start(
        self,
        ranks: int,
        g2: int,
        g3: int,
        limited: bool,
        share: float,
        kind: str,
        prompt: list[BlockMeta],
    ) -> None:
        self.ranks, self.sizes = ranks, {G2: g2, G3: g3}
        self.limits = LIMITS if limited else {}
        self.share, self.kind = share, kind
        self.cat = self.new()
        self.shell = Shell()
        self.now = 1000
        self.stamps = 0
        self.bytes: dict[tuple[Tier, int], Stamp] = {}
        self.granted: dict[SlotRef, Granted] = {}
        self.orphans: dict[SlotRef, Owner] = {}
        """Slots that owners of the daemon's former life are filling."""
        self.leases: dict[LeaseId, Leased] = {}
        self.copies: dict[int, tuple[Copy, Stamp | None]] = {}
        self.fencing: dict[int, tuple[Copy, Stamp | None]] = {}
        self.ended: list[Copy] = []
        self.pins: dict[tuple[bytes, str], tuple[int, set[bytes]]] = {}
        self.expiry: dict[tuple[Tier, bytes], int] = {}
        self.may_go: set[bytes] | None = set()
        """Blocks that this step may take away; None: any that nobody needs."""
        self.save(prompt, 5, OWNERS[0], 0)

    def new(self) -> Catalog:
        return catalog(
            self.sizes[G2],
            self.sizes[G3],
            ranks=self.ranks,
            limits=self.limits,
            grant_limit=GRANT_LIMIT,
            pin_share=self.share,
            policy=partial(new_eviction, kind=self.kind),
        )

    # What the shell and the engines do.

    def stamp(self, tier: Tier, ref: SlotRef, key: bytes) -> Stamp:
        """Somebody writes into a slot: nobody may be reading it, nor may it hold a block."""
        index = ref.index
        for lease in self.leases.values():
            if tier is G2:
                assert all(seen.index != index for seen in lease.seen), "a reader is overwritten"
        for copy, _ in [*self.copies.values(), *self.fencing.values()]:
            source = copy.source_slot
            assert (copy.source, source and source.index) != (tier, index), "a source is written"
        for name in self.cat.keys(tier):
            there = self.cat.slot(tier, name)
            assert there is not None and there.index != index, "a block is overwritten"
        self.stamps += 1
        self.bytes[tier, index] = key, self.stamps
        return self.bytes[tier, index]

    def writers(self) -> list[tuple[Tier, int]]:
        """Slots into which somebody may write now."""
        slots = [(G2, ref.index) for ref in [*self.granted, *self.orphans]]
        for copy, _ in [*self.copies.values(), *self.fencing.values()]:
            if copy.target_slot is not None:
                slots.append((copy.target, copy.target_slot.index))
        return slots

    def apply(self) -> None:
        """Performs the changes, and judges what has gone by them."""
        before = {tier: set(told) for tier, told in self.shell.told.items()}
        self.shell.apply(self.cat.take_changes())
        for tier in (G2, G3):
            for gone in before[tier] - self.shell.told[tier]:
                if self.may_go is not None:
                    assert gone in self.may_go, "a step took a block away that it may not"
        for tier in (G2, G3, G4):
            for gone in before[tier] - self.shell.told[tier]:
                self.expiry.pop((tier, gone), None)
        local = self.shell.told[G2] | self.shell.told[G3]
        for name, (until, pinned) in list(self.pins.items()):
            pinned &= local
            if not pinned:
                del self.pins[name]
            else:
                self.pins[name] = until, pinned
        self.may_go = set()

    def tick(self, by: int = 1) -> int:
        self.now += by
        return self.now

    # Engines that write.

    @rule(owner=st.sampled_from(OWNERS), count=st.integers(1, 4))
    def grant(self, owner: Owner, count: int) -> None:
        busy = set(self.writers())
        had = sum(g.owner == owner for g in self.granted.values())
        self.may_go = None
        used = {ref.index for lease in self.leases.values() for ref in lease.seen} | {
            c.source_slot.index for c, _ in self.copies.values() if c.source is G2 and c.source_slot
        }
        for ref in self.cat.grant(owner, count, self.tick()):
            assert (G2, ref.index) not in busy and ref.index not in used
            busy.add((G2, ref.index))
            self.granted[ref] = Granted(owner)
        self.apply()
        assert sum(g.owner == owner for g in self.granted.values()) <= max(had, GRANT_LIMIT)

    @precondition(lambda self: self.granted)
    @rule(
        data=st.data(),
        block=st.sampled_from(list(BLOCKS)),
        rank=st.integers(0, 1),
        ttl=st.sampled_from([0, 0, 3, 30]),
    )
    def commit(self, data: st.DataObject, block: bytes, rank: int, ttl: int) -> None:
        self.fill(data.draw(st.sampled_from(list(self.granted))), block, rank % self.ranks, ttl)

    @rule(
        prompt=st.sampled_from(PROMPTS),
        count=st.integers(1, 5),
        owner=st.sampled_from(OWNERS),
        ttl=st.sampled_from([0, 0, 40]),
    )
    def save(self, prompt: list[BlockMeta], count: int, owner: Owner, ttl: int) -> None:
        """What an engine does after a prefill."""
        for meta in prompt[:count]:
            if self.cat.slot(G2, meta.key) is None:
                ref = next((r for r, g in self.granted.items() if self.untouched(g, owner)), None)
                if ref is None:
                    self.grant(owner, 2)
                    ref = next(
                        (r for r, g in self.granted.items() if self.untouched(g, owner)), None
                    )
                if ref is None:
                    return
                for rank in range(self.ranks):
                    self.fill(ref, meta.key, rank, ttl)

    @staticmethod
    def untouched(grant: Granted, owner: Owner) -> bool:
        return grant.owner == owner and not grant.ranks

    def fill(self, ref: SlotRef, block: bytes, rank: int, ttl: int) -> None:
        grant = self.granted[ref]
        now = self.tick()
        meta = replace(BLOCKS[block], created_ms=now, expires_ms=now + ttl if ttl else 0)
        if rank not in grant.ranks:
            self.stamp(G2, ref, block)
        if grant.meta is not None and grant.meta.key != block:
            grant.void = True
        grant.meta = grant.meta or meta
        grant.ranks.add(rank)
        self.may_go = None
        result = self.cat.commit(grant.owner, ref, rank, meta, 5, now)
        last = len(grant.ranks) == self.ranks
        if not last:
            assert result is (CommitResult.FENCED if grant.void else CommitResult.PENDING)
        elif grant.void:
            assert result is CommitResult.FENCED
        else:
            first = grant.meta
            already = self.expiry.get((G2, block))
            if already is not None and not 0 < already <= now:
                assert result is CommitResult.DUPLICATE
            else:
                assert result in (CommitResult.STORED, CommitResult.REFUSED)
                assert result is CommitResult.STORED or (first.tenant, G2) in self.limits
            if result is CommitResult.STORED:
                assert self.cat.slot(G2, block) == ref
                self.bytes[G2, ref.index] = block, self.stamps
        if last:
            del self.granted[ref]
        self.apply()
        if last and result is CommitResult.STORED:
            assert grant.meta is not None
            self.expiry[G2, block] = grant.meta.expires_ms
            assert self.cat.commit(grant.owner, ref, rank, meta, 5, now) is result

    @rule(
        owner=st.sampled_from(OWNERS),
        index=st.integers(0, 7),
        generation=st.integers(0, 9),
        block=st.sampled_from(list(BLOCKS)),
        back=st.booleans(),
    )
    def late(self, owner: Owner, index: int, generation: int, block: bytes, back: bool) -> None:
        """Anybody may say anything of slots that are not his."""
        ref = SlotRef(index, generation)
        if ref in self.granted and (self.ranks > 1 or self.granted[ref].owner == owner):
            return
        if back:
            result = self.cat.give_back(owner, ref, self.tick())
            assert result in (CommitResult.FENCED, CommitResult.RETURNED)
        else:
            told = CommitResult.STORED, CommitResult.DUPLICATE, CommitResult.FENCED
            stored = self.cat.slot(G2, block)
            result = self.cat.commit(owner, ref, 0, BLOCKS[block], 5, self.tick())
            assert result in told and self.cat.slot(G2, block) in (stored, None)
        self.may_go = self.expired()
        self.apply()

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(list(self.granted)))
        owner = self.granted.pop(ref).owner
        assert self.cat.give_back(owner, ref, self.tick()) is CommitResult.RETURNED
        self.apply()

    @rule(owner=st.sampled_from(OWNERS))
    def die(self, owner: Owner) -> None:
        held = [ref for ref, grant in self.granted.items() if grant.owner == owner]
        held += [ref for ref, former in self.orphans.items() if former == owner]
        assert self.cat.release_owner(owner, self.tick()) == len(held)
        self.granted = {ref: g for ref, g in self.granted.items() if g.owner != owner}
        self.orphans = {ref: o for ref, o in self.orphans.items() if o != owner}
        self.leases = {id: lease for id, lease in self.leases.items() if lease.owner != owner}
        self.apply()

    # Engines that read.

    @rule(
        prompt=st.sampled_from(PROMPTS),
        skip=st.integers(0, 2),
        ttl=st.integers(1, 40),
        owner=st.sampled_from([None, *OWNERS]),
    )
    def look_up(self, prompt: list[BlockMeta], skip: int, ttl: int, owner: Owner | None) -> None:
        wanted = keys(prompt[skip:])
        now = self.tick()
        self.cat.touch(wanted, now)
        run = self.cat.run(wanted)
        assert run == [self.cat.tiers_of(k) for k in wanted[: len(run)]]
        assert len(run) == len(wanted) or not self.cat.tiers_of(wanted[len(run)])
        lease = self.cat.lease(wanted, 0, now + ttl, now, owner=owner)
        leading = [G2 in tiers for tiers in run]
        assert len(lease.ready) == ([*leading, False]).index(False)
        assert [b.key for b in lease.ready] == wanted[: len(lease.ready)]
        assert lease.id not in self.leases
        seen = {b.ref: self.bytes[G2, b.ref.index] for b in lease.ready}
        self.leases[lease.id] = Leased(wanted, now + ttl, owner, seen)
        self.apply()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(list(self.leases)))
        lease = self.leases[id]
        ready = self.cat.lease_ready(id)
        assert [b.key for b in ready] == lease.keys[: len(ready)]
        assert {b.ref for b in ready[: len(lease.seen)]} == set(lease.seen)
        for block in ready[len(lease.seen) :]:
            assert self.cat.slot(G2, block.key) == block.ref
            lease.seen[block.ref] = self.bytes[G2, block.ref.index]
        self.apply()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(list(self.leases)))
        del self.leases[id]
        assert self.cat.release(id, self.tick())
        assert not self.cat.release(id, self.now)
        self.apply()

    def expired(self) -> set[bytes]:
        return {block for (_, block), until in self.expiry.items() if 0 < until <= self.now}

    @rule(by=st.integers(0, 20))
    def pass_time(self, by: int) -> None:
        now = self.tick(by)
        due = {id for id, lease in self.leases.items() if lease.expires_ms <= now}
        old = {name for name, (until, _) in self.pins.items() if until <= now}
        self.may_go = self.expired()
        gone = [(t, k) for (t, k), until in self.expiry.items() if t is not G4 and 0 < until <= now]
        for name in old:
            del self.pins[name]
        result = self.cat.expire(now)
        assert (result.leases, result.blocks) == (len(due), len(gone))
        for id in due:
            del self.leases[id]
        self.apply()
        assert not any(
            until and until <= now for (t, _), until in self.expiry.items() if t is not G4
        )

    # Between tiers.

    @rule(
        block=st.sampled_from(list(BLOCKS)),
        way=st.sampled_from([(G2, G3), (G3, G2), (G2, G4), (G3, G4), (G4, G2)]),
    )
    def begin(self, block: bytes, way: tuple[Tier, Tier]) -> None:
        self.start_copy(block, way)

    def start_copy(self, block: bytes, way: tuple[Tier, Tier]) -> int | None:
        source, target = way
        busy = set(self.writers())
        self.may_go = None
        if source is G4:
            copy = self.cat.begin_fetch(BlockMeta(block), self.tick())
        else:
            copy = self.cat.begin_copy(block, source, target, self.tick())
        if copy is not None:
            assert (copy.source, copy.target) == way
            taken = None
            if copy.source_slot is not None:
                taken = self.bytes[source, copy.source_slot.index]
                assert taken[0] == block and self.cat.slot(source, block) == copy.source_slot
            if copy.target_slot is not None:
                assert (target, copy.target_slot.index) not in busy
                # A store on disk first makes sure that the slot's old block isn't found again.
                self.shell.headers[target, copy.target_slot.index] = SlotHeader(SlotState.FREE, 0)
                self.stamp(target, copy.target_slot, b"partly")
            self.copies[copy.id] = copy, taken
        self.apply()
        if copy is not None and target is G3 and copy.target_slot is not None:
            free = SlotHeader(SlotState.FREE, copy.target_slot.generation - 1)
            self.shell.headers[G3, copy.target_slot.index] = free
        return copy.id if copy is not None else None

    @rule(
        prompt=st.sampled_from(PROMPTS),
        way=st.sampled_from([(G2, G3), (G2, G3), (G3, G2), (G2, G4), (G4, G2)]),
        fails=st.integers(0, 8),
    )
    def move(self, prompt: list[BlockMeta], way: tuple[Tier, Tier], fails: int) -> None:
        """What the daemon does with a prompt's blocks."""
        began = [id for meta in prompt if (id := self.start_copy(meta.key, way)) is not None]
        for number, id in enumerate(began):
            self.finish_copy(id, number != fails)

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), ok=st.booleans())
    def end(self, data: st.DataObject, ok: bool) -> None:
        self.finish_copy(data.draw(st.sampled_from(list(self.copies))), ok)

    def finish_copy(self, id: int, ok: bool) -> None:
        copy, taken = self.copies.pop(id)
        key, target, header = copy.meta.key, copy.target, None
        now = self.tick()
        if copy.source_slot is not None:
            assert self.bytes[copy.source, copy.source_slot.index] == taken, "a source has changed"
        if ok and copy.target_slot is not None:
            self.bytes[target, copy.target_slot.index] = taken or (key, 0)
            if copy.source is G4:
                meta = replace(BLOCKS[key], checksums=(5,) * self.ranks, created_ms=now)
                header = sealed_header(meta, 0, PAYLOAD)
            if target is G3:
                self.shell.headers[G3, copy.target_slot.index] = sealed_header(
                    copy.meta, copy.target_slot.generation, PAYLOAD
                )
        self.may_go = None
        done = self.cat.end_copy(copy, ok, now, header=header)
        assert not self.cat.end_copy(copy, ok, now, header=header)
        assert ok or not done
        self.apply()
        if done:
            expires = header.expires_ms if header is not None else copy.meta.expires_ms
            self.expiry[target, key] = expires
            if target is not G4:
                assert self.cat.slot(target, key) == copy.target_slot
        self.ended.append(copy)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def run_into_the_deadline(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(list(self.copies)))
        self.fencing[id] = self.copies.pop(id)
        assert not self.cat.end_copy(self.fencing[id][0], False, self.tick(), terminal=False)
        self.apply()

    @precondition(lambda self: self.fencing)
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(list(self.fencing)))
        copy, taken = self.fencing.pop(id)
        if copy.target_slot is not None:
            # The late write.
            index = copy.target, copy.target_slot.index
            assert self.bytes[index][0] == b"partly", "somebody else has used the slot"
        if copy.source_slot is not None:
            assert self.bytes[copy.source, copy.source_slot.index] == taken
        self.cat.fence_passed(copy, self.tick())
        self.apply()

    @rule(block=st.sampled_from(list(BLOCKS)), there=st.booleans())
    def remote(self, block: bytes, there: bool) -> None:
        self.cat.set_remote([block], there)
        self.apply()
        assert (block in self.shell.told[G4]) is (
            there and block in self.shell.told[G2] | self.shell.told[G3]
        )

    @rule(block=st.sampled_from(list(BLOCKS)), tier=st.sampled_from([G2, G3]), bad=st.booleans())
    def forget(self, block: bytes, tier: Tier, bad: bool) -> None:
        was = self.cat.slot(tier, block) is not None
        self.may_go = {block}
        assert self.cat.forget(tier, block, self.tick(), quarantine=bad) is was
        assert tier not in self.cat.tiers_of(block)
        self.apply()

    @rule(tier=st.sampled_from([G2, G3]))
    def forgive(self, tier: Tier) -> None:
        free = self.cat.counts().tiers[tier].free
        forgiven = self.cat.forgive(tier)
        assert self.cat.counts().tiers[tier].free == free + forgiven
        self.apply()

    # People.

    @rule(
        block=st.sampled_from(list(BLOCKS)), who=st.sampled_from(["x", "y"]), ttl=st.integers(1, 60)
    )
    def pin(self, block: bytes, who: str, ttl: int) -> None:
        path, at = [], block
        while at in BLOCKS:
            path.append(at)
            at = BLOCKS[at].parent
        self.may_go = None
        now = self.tick()
        try:
            count = self.cat.pin(block, who, now + ttl, now)
        except PinLimit:
            assert self.share < 1
            self.apply()
            return
        self.may_go = self.expired()
        self.apply()
        here = set(path) & (self.shell.told[G2] | self.shell.told[G3])
        if count is None:
            assert block not in here
            return
        # Blocks before one that is missing are known only while something hangs on them.
        assert block not in here or count >= 1
        assert count <= len(here)
        if count == len(here):
            old = self.pins.get((block, who), (0, set()))[1]
            self.pins[block, who] = now + ttl, here | old
        else:
            self.cat.unpin(block, who)
            self.pins.pop((block, who), None)

    @rule(who=st.sampled_from(["x", "y"]), block=st.sampled_from([None, *BLOCKS]))
    def unpin(self, who: str, block: bytes | None) -> None:
        mine = [name for name in self.pins if name[1] == who and block in (None, name[0])]
        assert self.cat.unpin(block, who) == len(mine)
        for name in mine:
            del self.pins[name]
        self.apply()

    @rule(
        tenant=st.sampled_from([None, 1, 2, 3]),
        prefix=st.sampled_from([None, *BLOCKS]),
        tiers=st.sampled_from([None, frozenset({G2}), frozenset({G3}), frozenset({G2, G3})]),
        dry=st.booleans(),
    )
    def clear(
        self,
        tenant: int | None,
        prefix: bytes | None,
        tiers: frozenset[Tier] | None,
        dry: bool,
    ) -> None:
        """A clear takes all that follow the prefix and are known to."""
        select = Selection(tenant, prefix, tiers)
        told = {t: set(self.shell.told[t]) for t in (G2, G3)}
        sure, maybe = set(), set()
        for block, meta in BLOCKS.items():
            if tenant not in (None, meta.tenant):
                continue
            at, whole = block, True
            while at in BLOCKS and at != prefix:
                at = BLOCKS[at].parent
                whole = whole and at in told[G2] | told[G3]
            if prefix is None or at == prefix:
                maybe.add(block)
                if prefix is None or block == prefix or whole:
                    sure.add(block)
        affected = tiers or {G2, G3}
        counted = self.cat.clear(select, self.tick(), dry_run=True)
        cleared = counted if dry else self.cat.clear(select, self.now)
        assert cleared == counted
        for tier in set(affected) & {G2, G3}:
            assert len(told[tier] & sure) <= cleared.blocks[tier] <= len(told[tier] & maybe)
        if not dry:
            self.may_go = maybe
            for tier in affected:
                assert not any(tier in self.cat.tiers_of(block) for block in sure)
        self.apply()

    # Restart.

    @precondition(lambda self: len(self.shell.told[G2]) >= 3)
    @rule(dead=st.sets(st.sampled_from(OWNERS)))
    def restart(self, dead: set[Owner]) -> None:
        """kill -9 of the daemon, and of some engines: headers are all that is left."""
        new, now = self.new(), self.tick()
        expected = {
            tier: {
                block for block in self.shell.told[tier] if not 0 < self.expiry[tier, block] <= now
            }
            for tier in (G2, G3)
        }
        writing = {ref: g.owner for ref, g in self.granted.items() if g.owner not in dead}
        writing |= {ref: o for ref, o in self.orphans.items() if o not in dead}
        found = {tier: 0 for tier in (G2, G3)}
        for tier in (G2, G3):
            for slot in range(self.sizes[tier]):
                header = self.shell.header(tier, slot)
                verdict = new.adopt(tier, slot, header, now, lambda o: o not in dead)
                found[tier] += verdict is Adopted.ADOPTED
                if verdict is Adopted.ADOPTED:
                    assert new.slot(tier, header.key) == self.cat.slot(tier, header.key)
                if verdict is Adopted.QUARANTINED:
                    assert writing[SlotRef(slot, header.generation)] == header.owner
                assert verdict is not Adopted.CORRUPT and verdict is not Adopted.DUPLICATE
        for tier in (G2, G3):
            assert set(new.keys(tier)) == expected[tier] and found[tier] == len(expected[tier])
        assert new.counts().tiers[G2].quarantined == len(writing)
        self.cat, self.orphans = new, writing
        self.granted, self.leases, self.copies, self.fencing = {}, {}, {}, {}
        self.pins = {}
        self.shell.told = {tier: set() for tier in (G2, G3, G4)}
        self.expiry = {
            (tier, block): until
            for (tier, block), until in self.expiry.items()
            if tier is not G4 and block in expected[tier]
        }
        self.apply()

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), ok=st.booleans())
    def end_again(self, data: st.DataObject, ok: bool) -> None:
        copy = data.draw(st.sampled_from(self.ended))
        if copy.id not in self.copies and copy.id not in self.fencing:
            assert not self.cat.end_copy(copy, ok, self.tick())
            self.cat.fence_passed(copy, self.now)
            self.apply()

    # What always holds.

    @invariant()
    def it_is_sound(self) -> None:
        self.cat.check_invariants()
        assert len(self.writers()) == len(set(self.writers())), "two write into one slot"

    @invariant()
    def what_is_found_is_what_was_told_and_its_bytes_are_its_own(self) -> None:
        for tier in (G2, G3):
            here = set(self.cat.keys(tier))
            assert here == self.shell.told[tier]
            for block in here:
                ref = self.cat.slot(tier, block)
                assert ref is not None and (tier, ref.index) not in self.writers()
                assert self.bytes[tier, ref.index][0] == block
                header = self.shell.header(tier, ref.index)
                assert (header.state, header.key) == (SlotState.SEALED, block)
                assert header.generation == ref.generation
        assert set(self.cat.keys(G4)) == self.shell.told[G4]

    @invariant()
    def readers_read_what_they_found(self) -> None:
        for lease in self.leases.values():
            for ref, stamp in lease.seen.items():
                assert self.bytes[G2, ref.index] == stamp
                header = self.shell.header(G2, ref.index)
                assert (header.state, header.key) == (SlotState.SEALED, stamp[0])
                assert header.generation == ref.generation

    @invariant()
    def quotas_hold(self) -> None:
        use = self.cat._quota.use()
        assert use == self.cat.charges()
        for of, limit in self.limits.items():
            assert use.get(of, 0) <= limit or of[1] is G4

    @invariant()
    def nothing_leaks(self) -> None:
        counts = self.cat.counts()
        assert counts.leases == len(self.leases) and counts.pins == len(self.pins)
        assert counts.granted == len(self.granted) + len(self.orphans)
        assert counts.copies == len(self.copies) + len(self.fencing)
        assert counts.tiers[G2].slots == self.sizes[G2]
        if not self.leases and not self.copies and not self.fencing:
            assert all(tier.leaving == tier.leased == 0 for tier in counts.tiers.values())

    @invariant()
    def pinned_blocks_stay(self) -> None:
        for _, pinned in self.pins.values():
            for block in pinned:
                assert self.cat.view(block) is not None


CatalogMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestCatalog = CatalogMachine.TestCase
