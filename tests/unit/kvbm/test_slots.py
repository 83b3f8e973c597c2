"""Slots of one tier: legal steps alone, generations that grow, owners that hold what they hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.events.model import Tier
from services.kvbm.core.blocks import Held
from services.kvbm.core.model import BlockMeta, Owner, ReadyBlock, SlotRef
from services.kvbm.core.slots import IllegalStep, Slots

A, B = Owner(1), Owner(2)


def held(ref: SlotRef) -> Held:
    return Held(BlockMeta(b"k" * 32), ReadyBlock(b"k" * 32, ref, ()))


def taken(slots: Slots, owner: Owner = A) -> SlotRef:
    ref = slots.take(owner)
    assert ref is not None
    return ref


def test_a_life_of_a_slot() -> None:
    slots = Slots(Tier.G2, 1)
    ref = taken(slots)
    assert ref == SlotRef(0, 1)
    assert slots.owner(0) == A and slots.take(B) is None
    slots.register(0, held(ref))
    assert slots.owner(0) is None and slots.counts().blocks == 1
    slots.readers[0] += 1
    slots.leave(0)
    assert slots.counts().leaving == slots.counts().leased == 1
    slots.readers[0] -= 1
    slots.free(0)
    assert taken(slots, B) == SlotRef(0, 2)
    assert not slots.current(ref) and slots.current(SlotRef(0, 2))
    slots.check_invariants()


@pytest.mark.parametrize("step", ["register", "leave", "quarantine", "free"])
def test_a_free_slot_can_only_be_taken(step: str) -> None:
    slots = Slots(Tier.G2, 1)
    with pytest.raises(IllegalStep):
        if step == "register":
            slots.register(0, held(SlotRef(0, 0)))
        else:
            getattr(slots, step)(0)


def test_what_is_read_is_neither_freed_nor_quarantined() -> None:
    slots = Slots(Tier.G2, 1)
    slots.register(0, held(taken(slots)))
    slots.readers[0] += 1
    with pytest.raises(IllegalStep, match="being read"):
        slots.free(0)
    with pytest.raises(IllegalStep, match="being read"):
        slots.quarantine(0)
    slots.readers[0] -= 1
    with pytest.raises(IllegalStep, match="nobody reads"):
        slots.leave(0)


def test_a_quarantined_slot_stays_its_owners_and_is_not_taken() -> None:
    slots = Slots(Tier.G2, 1)
    taken(slots)
    slots.quarantine(0)
    assert slots.owned(A) == [0] and slots.take(B) is None
    slots.free(0)
    assert slots.owned(A) == [] and slots.take(B) == SlotRef(0, 2)


def test_a_bad_slot_gets_a_second_chance_and_a_third_only_with_all_others() -> None:
    slots = Slots(Tier.G3, 2)

    def both_go_bad() -> None:
        """Slot 0 while somebody reads it."""
        for _ in range(2):
            ref = taken(slots)
            slots.register(ref.index, held(ref))
        slots.readers[0] += 1
        slots.leave(0, bad=True)
        slots.quarantine(1)

    def read() -> None:
        slots.readers[0] -= 1
        (slots.quarantine if slots.bad(0) else slots.free)(0)
        slots.check_invariants()

    both_go_bad()
    assert slots.forgive(again=False) == [1] and not slots.bad(0)
    read()
    both_go_bad()
    assert slots.forgive(again=False) == [] and slots.bad(0)
    read()
    assert slots.forgive(again=True) == [0, 1]
    slots.check_invariants()


def test_nothing_is_restored_once_something_was_taken() -> None:
    """C12: an allocator that takes before it knows what is there overwrites live blocks."""
    slots = Slots(Tier.G2, 3)
    slots.restore(1, 5, held=held(SlotRef(1, 5)))
    with pytest.raises(IllegalStep, match="in use"):
        slots.restore(1, 6)
    assert taken(slots) == SlotRef(0, 1)
    with pytest.raises(IllegalStep, match="in use"):
        slots.restore(2, 1)
    assert taken(slots) == SlotRef(2, 1)
    assert slots.take(A) is None
    slots.check_invariants()


def test_new_slots_are_numbered_on() -> None:
    slots = Slots(Tier.G3, 1)
    taken(slots)
    slots.add(2)
    assert [taken(slots).index, taken(slots).index] == [1, 2]
    slots.check_invariants()


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.sampled_from([A, B])), max_size=60)
)
def test_any_order_of_steps_counts_right(steps: list[tuple[int, int, Owner]]) -> None:
    """L2: free + filling + registered + leaving + quarantined is always all."""
    slots = Slots(Tier.G2, 3)
    last: dict[int, int] = {}
    for step, at, owner in steps:
        if step == 0:
            ref = slots.take(owner)
            if ref is not None:
                assert ref.generation > last.get(ref.index, 0)
                last[ref.index] = ref.generation
            continue
        try:
            if step == 1:
                slots.register(at, held(SlotRef(at, slots.generations[at])))
            elif step == 2:
                slots.quarantine(at)
            elif step == 3:
                slots.free(at)
            else:
                slots.restore(at, 1)
        except IllegalStep:
            pass
        slots.check_invariants()
