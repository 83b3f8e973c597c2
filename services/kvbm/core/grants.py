"""Grants: slots of G2 that engines fill, and what becomes of them.

A slot stays its owner's until the owner says that its writes have ended (by a commit of every rank,
or by giving it back) or is gone. No grant ends by time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.common.arena import NO_KEY
from services.common.events.model import Tier
from services.kvbm.core.model import DAEMON, BlockMeta, CommitResult, Owner, SlotRef
from services.kvbm.core.slots import Use
from services.kvbm.core.stock import Stock


@dataclass(slots=True)
class _Shards:
    """What the ranks have said so far about one slot."""

    meta: BlockMeta
    checksums: dict[int, int]
    void: bool = False
    """They contradict each other: nothing is stored, whatever the others say."""


class Grants:
    """All grants of a namespace."""

    def __init__(self, stock: Stock, ranks: int, limit: int, share: float) -> None:
        self._stock = stock
        self._slots = stock.slots[Tier.G2]
        self._ranks = ranks
        self._limit = limit
        self._share = share
        self._partly: dict[int, _Shards] = {}

    def grant(self, owner: Owner, count: int) -> list[SlotRef]:
        """Up to `count` empty slots, within the owner's limit and as far as there is room."""
        if owner == DAEMON:
            raise ValueError("owner 0 is the daemon itself")
        granted: list[SlotRef] = []
        for _ in range(min(count, self._limit_of(owner) - self._slots.owned_count(owner))):
            ref = self._stock.take(Tier.G2, owner)
            if ref is None:
                break
            granted.append(ref)
        return granted

    def _limit_of(self, owner: Owner) -> int:
        """Most slots an owner may hold now: what stands empty for engines keeps no block."""
        owners = {*self._slots.owners(), owner} - {DAEMON}
        return max(1, int(min(self._limit, len(self._slots) * self._share / len(owners))))

    def granted(self, owner: Owner) -> int:
        """Slots that the owner may write into."""
        return self._slots.owned_count(owner)

    def total(self) -> int:
        """Slots that engines may write into."""
        slots = self._slots
        return sum(slots.owned_count(owner) for owner in slots.owners() if owner != DAEMON)

    def commit(
        self, owner: Owner, ref: SlotRef, rank: int, block: BlockMeta, checksum: int
    ) -> CommitResult:
        """A rank has filled its shard. The last one decides; a repeated commit answers the same."""
        slots = self._slots
        if not slots.current(ref) or not 0 <= rank < self._ranks:
            return CommitResult.FENCED
        use = slots.uses[ref.index]
        if use != Use.FILLING:
            return self._repeated(ref, rank, block, checksum)
        holder = slots.owner(ref.index)
        # Ranks are processes of their own; that they know slot and generation shows whose they are.
        if holder == DAEMON or (self._ranks == 1 and holder != owner):
            return CommitResult.FENCED
        shards = self._partly.get(ref.index)
        if shards is None:
            shards = self._partly[ref.index] = _Shards(block, {})
        if shards.checksums.setdefault(rank, checksum) != checksum or not _same(shards.meta, block):
            shards.void = True
        if len(shards.checksums) < self._ranks:
            # Also a void slot stays theirs: the other ranks may be writing yet.
            return CommitResult.FENCED if shards.void else CommitResult.PENDING
        del self._partly[ref.index]
        result = self._store(ref, shards)
        if result is not CommitResult.STORED:
            self._stock.give_up(Tier.G2, ref.index)
        return result

    def _store(self, ref: SlotRef, shards: _Shards) -> CommitResult:
        stock, meta = self._stock, shards.meta
        if shards.void:
            return CommitResult.FENCED
        if len(meta.key) != len(NO_KEY) or len(meta.parent) != len(NO_KEY) or meta.key == NO_KEY:
            return CommitResult.REFUSED
        known = stock.live(meta.key)
        if known is not None and known.g2 is not None:
            return CommitResult.DUPLICATE
        if not stock.charge(meta.tenant, Tier.G2):
            return CommitResult.REFUSED
        checksums = tuple(shards.checksums[rank] for rank in range(self._ranks))
        # What lies in a lower tier was computed once more: it is wanted.
        stock.register(Tier.G2, ref, replace(meta, checksums=checksums), reused=known is not None)
        return CommitResult.STORED

    def _repeated(self, ref: SlotRef, rank: int, block: BlockMeta, checksum: int) -> CommitResult:
        """A commit of a slot that isn't being filled any more: a repetition, or too late."""
        held = self._slots.held[ref.index]
        if held is not None:
            same = _same(held.meta, block) and held.meta.checksums[rank] == checksum
            return CommitResult.STORED if same else CommitResult.FENCED
        known = self._stock.live(block.key)
        free = self._slots.uses[ref.index] == Use.FREE
        duplicate = free and known is not None and known.g2 is not None
        return CommitResult.DUPLICATE if duplicate else CommitResult.FENCED

    def give_back(self, owner: Owner, ref: SlotRef) -> CommitResult:
        """The owner's writes into a slot have ended, and it holds nothing."""
        slots = self._slots
        if not slots.current(ref):
            return CommitResult.FENCED
        if slots.uses[ref.index] == Use.FREE:
            return CommitResult.RETURNED
        if slots.uses[ref.index] != Use.FILLING or slots.owner(ref.index) != owner:
            return CommitResult.FENCED
        self._partly.pop(ref.index, None)
        self._stock.give_up(Tier.G2, ref.index)
        return CommitResult.RETURNED

    def release_owner(self, owner: Owner) -> int:
        """All the owner's writes have ended: its slots are empty; how many. O(its slots)."""
        if owner == DAEMON:
            raise ValueError("owner 0 is the daemon itself")
        indices = self._slots.owned(owner)
        for index in indices:
            self._partly.pop(index, None)
            self._stock.give_up(Tier.G2, index)
        return len(indices)

    def check_invariants(self) -> None:
        """Raises AssertionError when something is known of a slot that nobody fills."""
        for index, shards in self._partly.items():
            assert self._slots.uses[index] == Use.FILLING
            assert self._slots.owner(index) != DAEMON
            assert 0 < len(shards.checksums) < self._ranks


def _same(one: BlockMeta, other: BlockMeta) -> bool:
    """Whether two commits speak of one block; their times and checksums may differ."""
    return (one.key, one.parent, one.position, one.tenant) == (
        other.key,
        other.parent,
        other.position,
        other.tenant,
    )
