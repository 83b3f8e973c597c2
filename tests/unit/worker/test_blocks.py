"""The mirror of G1 blocks against a naive list of copies."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.common.events.model import (
    BlocksCleared,
    BlocksDigest,
    BlocksRemoved,
    BlocksStored,
    Tier,
)
from services.common.ids import BlockKey
from services.worker.core.blocks import (
    AllDropped,
    BlockChange,
    BlockMirror,
    CopiesAdded,
    CopiesDropped,
)

KEYS = st.lists(st.integers(1, 6).map(BlockKey), min_size=1, max_size=4)
RANKS = st.integers(0, 1)


def added(*keys: int, rank: int = 0) -> CopiesAdded:
    return CopiesAdded(tuple(BlockKey(k) for k in keys), rank)


def dropped(*keys: int, rank: int = 0) -> CopiesDropped:
    return CopiesDropped(tuple(BlockKey(k) for k in keys), rank)


def test_only_the_first_copy_and_the_last_loss_are_told() -> None:
    mirror = BlockMirror()
    assert mirror.apply([added(1, 2)]) == [BlocksStored(Tier.G1, (1, 2))]
    assert mirror.apply([added(1), dropped(1)]) == []
    assert mirror.apply([dropped(1)]) == [BlocksRemoved(Tier.G1, (1,))]
    assert len(mirror) == 1


def test_neighbours_of_one_kind_are_one_event_and_order_is_kept() -> None:
    mirror = BlockMirror()
    mirror.apply([added(1, 2, 3)])
    events = mirror.apply([dropped(1), dropped(2), added(1), added(4), dropped(3)])
    assert events == [
        BlocksRemoved(Tier.G1, (1, 2)),
        BlocksStored(Tier.G1, (1, 4)),
        BlocksRemoved(Tier.G1, (3,)),
    ]


def test_ranks_are_apart() -> None:
    mirror = BlockMirror()
    events = mirror.apply([added(1), added(1, rank=1), AllDropped(0)])
    assert events == [
        BlocksStored(Tier.G1, (1,), 0),
        BlocksStored(Tier.G1, (1,), 1),
        BlocksCleared(Tier.G1, 0),
    ]
    assert [(t.dp_rank, list(t.keys)) for t in mirror.blocks()] == [(1, [1])]


def test_the_digest_is_of_what_is_held() -> None:
    mirror = BlockMirror()
    mirror.apply([added(1, 2, 4), added(2), added(8, rank=1)])
    assert mirror.digests() == [BlocksDigest(Tier.G1, 3, 7, 0), BlocksDigest(Tier.G1, 1, 8, 1)]
    mirror.apply([dropped(2), dropped(1), AllDropped(1), added(16, rank=1)])
    assert mirror.digests() == [BlocksDigest(Tier.G1, 2, 6, 0), BlocksDigest(Tier.G1, 1, 16, 1)]


def test_a_drop_of_nothing_is_counted_and_not_told() -> None:
    mirror = BlockMirror()
    assert mirror.apply([dropped(9)]) == []
    assert mirror.unknown_drops == 1


CHANGES: st.SearchStrategy[BlockChange] = st.one_of(
    st.builds(CopiesAdded, KEYS, RANKS),
    st.builds(CopiesDropped, KEYS, RANKS),
    st.builds(AllDropped, RANKS),
)


@given(st.lists(st.lists(CHANGES, max_size=6), max_size=10))
def test_a_follower_of_the_events_knows_what_the_engine_holds(
    batches: list[list[BlockChange]],
) -> None:
    mirror = BlockMirror()
    naive: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    follower: dict[int, set[int]] = {0: set(), 1: set()}
    for batch in batches:
        for change in batch:
            held = naive[change.dp_rank]
            if isinstance(change, AllDropped):
                held.clear()
            elif isinstance(change, CopiesAdded):
                held.update(change.keys)
            else:
                for key in change.keys:
                    if held[key]:
                        held[key] -= 1
        for event in mirror.apply(batch):
            known = follower[event.dp_rank]
            if isinstance(event, BlocksCleared):
                known.clear()
            elif isinstance(event, BlocksStored):
                assert known.isdisjoint(event.keys), "stored twice"
                known.update(event.keys)
            else:
                assert known.issuperset(event.keys), "removed what was not there"
                known.difference_update(event.keys)
        mirror.check_invariants()
        truth = {rank: {k for k, n in held.items() if n} for rank, held in naive.items()}
        assert follower == truth
        listed = {t.dp_rank: set(t.keys) for t in mirror.blocks()}
        assert listed == {rank: keys for rank, keys in truth.items() if keys}
