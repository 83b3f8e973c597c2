"""Slots of one tier: what each is used for, in which generation, by whom.

    FREE -> FILLING -> REGISTERED -> (LEAVING ->) FREE       and QUARANTINED from any but FREE

Knows no keys but what others put into `held`, and decides nothing: every illegal step raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from services.common.events.model import Tier
from services.kvbm.core.blocks import Held
from services.kvbm.core.model import Owner, SlotRef, TierCounts


class Use(IntEnum):
    """What a slot is used for."""

    FREE = 0
    FILLING = 1
    """Its owner alone may write into it."""
    REGISTERED = 2
    """It holds a block that can be found."""
    LEAVING = 3
    """It holds a block that nobody finds any more, but that somebody still reads."""
    QUARANTINED = 4
    """An operation on it hasn't ended yet, or its memory is bad."""


_LEGAL = frozenset(
    {
        (Use.FREE, Use.FILLING),
        (Use.FILLING, Use.REGISTERED),
        (Use.FILLING, Use.FREE),
        (Use.FILLING, Use.QUARANTINED),
        (Use.REGISTERED, Use.FREE),
        (Use.REGISTERED, Use.LEAVING),
        (Use.REGISTERED, Use.QUARANTINED),
        (Use.LEAVING, Use.FREE),
        (Use.LEAVING, Use.QUARANTINED),
        (Use.QUARANTINED, Use.FREE),
    }
)


class IllegalStep(RuntimeError):
    """A slot was asked for a step that its use forbids: a bug of the caller."""


class Slots:
    """All slots of one tier. Not thread-safe."""

    def __init__(self, tier: Tier, count: int) -> None:
        self.tier = tier
        self.uses = bytearray()
        self.generations: list[int] = []
        """Of the present or the last use; grows with every `take`."""
        self.readers: list[int] = []
        """Leases and copies that read a slot now."""
        self.held: list[Held | None] = []
        """Block in the slot, while it is REGISTERED or LEAVING."""
        self.changed: dict[int, None] = {}
        """Slots that took a step since the shell last wrote headers."""
        self.fresh = True
        """Nothing has been taken yet, so that slots may still be restored."""
        self._free: dict[int, None] = {}
        self._owner: dict[int, Owner] = {}
        self._owned: dict[Owner, dict[int, None]] = {}
        self._bad: set[int] = set()
        self._forgiven: set[int] = set()
        """Slots that have had their second chance."""
        self._counts = [0] * len(Use)
        self.add(count)

    def __len__(self) -> int:
        return len(self.uses)

    def add(self, count: int) -> None:
        """That many more, FREE."""
        first = len(self.uses)
        self.uses.extend(bytes(count))
        self.generations += [0] * count
        self.readers += [0] * count
        self.held += [None] * count
        self._counts[Use.FREE] += count
        # The last in goes first: new slots in rising order, before those that were free already.
        self._free.update(dict.fromkeys(range(first + count - 1, first - 1, -1)))

    # Questions.

    @property
    def any_free(self) -> bool:
        """Whether a slot is FREE."""
        return bool(self._free)

    def current(self, ref: SlotRef) -> bool:
        """Whether the slot exists and is still in that generation."""
        return 0 <= ref.index < len(self.uses) and self.generations[ref.index] == ref.generation

    def owner(self, index: int) -> Owner | None:
        """Who may write into the slot, while it is FILLING or QUARANTINED."""
        return self._owner.get(index)

    def owners(self) -> list[Owner]:
        """All who may write into some slot."""
        return list(self._owned)

    def owned(self, owner: Owner) -> list[int]:
        """Slots that the owner may write into, in the order in which it got them."""
        return list(self._owned.get(owner, ()))

    def owned_count(self, owner: Owner) -> int:
        """How many these are."""
        return len(self._owned.get(owner, ()))

    def blocks(self) -> Iterator[Held]:
        """All REGISTERED blocks in slot order."""
        for index, held in enumerate(self.held):
            if held is not None and self.uses[index] == Use.REGISTERED:
                yield held

    def counts(self) -> TierCounts:
        """Slots by use."""
        return TierCounts(
            self._counts[Use.REGISTERED],
            self._counts[Use.FREE],
            self._counts[Use.FILLING],
            self._counts[Use.QUARANTINED],
            self._counts[Use.LEAVING],
            len(self.readers) - self.readers.count(0),
        )

    # Steps.

    def take(self, owner: Owner) -> SlotRef | None:
        """A FREE slot for the owner to fill, in a new generation; None: there is none."""
        if not self._free:
            return None
        self.fresh = False
        index, _ = self._free.popitem()
        self.generations[index] += 1
        self._step(index, Use.FILLING)
        self._own(index, owner)
        return SlotRef(index, self.generations[index])

    def register(self, index: int, held: Held) -> None:
        """A filled slot holds a block from now on."""
        self._step(index, Use.REGISTERED)
        self._disown(index)
        self.held[index] = held

    def leave(self, index: int, *, bad: bool = False) -> None:
        """The block in it can't be found any more, but is still being read."""
        if not self.readers[index]:
            raise IllegalStep(f"nobody reads {self.tier.name} slot {index}")
        self._step(index, Use.LEAVING)
        if bad:
            self._bad.add(index)

    def free(self, index: int) -> None:
        """Nobody writes or reads it any more."""
        if self.readers[index]:
            raise IllegalStep(f"{self.tier.name} slot {index} is being read")
        self._step(index, Use.FREE)
        self._disown(index)
        self.held[index] = None
        self._bad.discard(index)
        self._free[index] = None

    def quarantine(self, index: int) -> None:
        """Out of use until `free`; its owner, if it has one, stays."""
        if self.readers[index]:
            raise IllegalStep(f"{self.tier.name} slot {index} is being read")
        self._step(index, Use.QUARANTINED)
        self.held[index] = None
        self._bad.discard(index)

    def bad(self, index: int) -> bool:
        """Whether a LEAVING slot is to be kept out of use in the end."""
        return index in self._bad

    def forgive(self, *, again: bool) -> list[int]:
        """Frees the slots that are out of use for their bytes and not for an operation on them.

        Once each, unless `again`. Those that are still being read will not be kept out of use.
        """
        spared: set[int] = set() if again else self._forgiven
        reading = self._bad - spared
        self._bad -= reading
        found = []
        index = self.uses.find(Use.QUARANTINED)
        while index >= 0:
            if index not in self._owner and index not in spared:
                self.free(index)
                found.append(index)
            index = self.uses.find(Use.QUARANTINED, index + 1)
        self._forgiven.update(reading, found)
        return found

    def restore(
        self,
        index: int,
        generation: int,
        *,
        held: Held | None = None,
        owner: Owner | None = None,
    ) -> None:
        """Says of a slot what a former life had used it for, before anything is taken.

        With a block it is REGISTERED, with an owner QUARANTINED, with neither FREE.
        """
        if not self.fresh or index not in self._free or self.generations[index]:
            raise IllegalStep(f"{self.tier.name} slot {index} is in use already")
        self.generations[index] = generation
        if held is None and owner is None:
            return
        use = Use.QUARANTINED if held is None else Use.REGISTERED
        del self._free[index]
        self.uses[index] = use
        self.held[index] = held
        self._counts[Use.FREE] -= 1
        self._counts[use] += 1
        if owner is not None:
            self._own(index, owner)

    def _step(self, index: int, use: Use) -> None:
        before = self.uses[index]
        if (before, use) not in _LEGAL:
            raise IllegalStep(f"{self.tier.name} slot {index}: {Use(before).name} to {use.name}")
        self.uses[index] = use
        self.changed[index] = None
        self._counts[before] -= 1
        self._counts[use] += 1

    def _own(self, index: int, owner: Owner) -> None:
        self._owner[index] = owner
        self._owned.setdefault(owner, {})[index] = None

    def _disown(self, index: int) -> None:
        owner = self._owner.pop(index, None)
        if owner is not None:
            owned = self._owned[owner]
            del owned[index]
            if not owned:
                del self._owned[owner]

    def check_invariants(self) -> None:
        """Raises AssertionError when anything about the slots doesn't fit."""
        size = len(self.uses)
        assert size == len(self.generations) == len(self.readers) == len(self.held)
        assert self.counts().slots == size
        for use in Use:
            assert self._counts[use] == self.uses.count(use), use
        for index, value in enumerate(self.uses):
            use = Use(value)
            assert (index in self._free) == (use == Use.FREE), index
            assert (self.held[index] is not None) == (use in (Use.REGISTERED, Use.LEAVING)), index
            assert self.readers[index] >= 0, index
            if use not in (Use.REGISTERED, Use.LEAVING):
                assert not self.readers[index], index
            if use == Use.LEAVING:
                assert self.readers[index], index
            if use not in (Use.FILLING, Use.QUARANTINED):
                assert index not in self._owner, index
        assert all(self.uses[index] == Use.LEAVING for index in self._bad)
        owned = {index: owner for owner, slots in self._owned.items() for index in slots}
        assert owned == self._owner
        assert all(self._owned.values())
