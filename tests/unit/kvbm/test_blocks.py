"""Blocks and their chains: linked in any order, across holes, and nothing left behind."""

from hypothesis import given
from hypothesis import strategies as st

from services.common.events.model import Tier
from services.kvbm.core.blocks import Block, Blocks, Held
from services.kvbm.core.model import BlockMeta, ReadyBlock, SlotRef
from tests.support.catalogs import chain, key, keys


def put(blocks: Blocks, meta: BlockMeta, tier: Tier = Tier.G2) -> Block:
    return blocks.put(tier, Held(meta, ReadyBlock(meta.key, SlotRef(0, 1), ())))


def drop(blocks: Blocks, block: Block) -> None:
    block.hold(Tier.G2, None)
    blocks.prune(block)


@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(0, 8))
def test_links_do_not_depend_on_the_order_and_do_not_leak(
    comes: list[int], goes: list[int], left: int
) -> None:
    blocks, metas = Blocks(), chain("a", 8)
    for i in comes:
        put(blocks, metas[i])
        blocks.check_invariants()
    root = blocks.get(metas[0].key)
    tip = blocks.get(metas[7].key)
    assert root is not None and tip is not None
    assert [b.key for b in Blocks.followers(root)] == keys(metas)
    assert [b.key for b in Blocks.path(tip)] == keys(metas)[::-1]
    for i in goes[: 8 - left]:
        block = blocks.get(metas[i].key)
        assert block is not None
        drop(blocks, block)
        blocks.check_invariants()
    here = goes[8 - left :]
    names = {b.key for b in blocks}
    # Missing blocks are known as far as one that is here follows them.
    assert names == {m.key for m in metas[: max(here, default=-1) + 1]}


def test_a_prefix_is_known_across_a_hole() -> None:
    blocks, metas = Blocks(), chain("a", 4)
    held = [put(blocks, meta) for meta in metas]
    drop(blocks, held[1])
    drop(blocks, held[2])
    assert [b.key for b in Blocks.followers(held[0]) if b.tiers] == [metas[0].key, metas[3].key]
    again = put(blocks, metas[2])
    assert again.parent is not None and again.parent.key == metas[1].key
    blocks.check_invariants()


def test_branches() -> None:
    blocks = Blocks()
    root = put(blocks, BlockMeta(key(0)))
    leaves = [put(blocks, BlockMeta(key(i), key(0), 1)) for i in range(1, 5)]
    assert set(Blocks.followers(root)) == {root, *leaves}
    drop(blocks, leaves[1])
    drop(blocks, leaves[3])
    drop(blocks, leaves[0])
    assert set(Blocks.followers(root)) == {root, leaves[2]}
    blocks.check_invariants()
    drop(blocks, root)
    assert {b.key for b in blocks} == {key(0), key(3)}
    drop(blocks, leaves[2])
    assert not list(blocks)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.booleans()),
        max_size=40,
    )
)
def test_whatever_an_engine_claims_there_are_no_cycles(
    claims: list[tuple[int, int, int, bool]],
) -> None:
    blocks = Blocks()
    for name, parent, position, comes in claims:
        block = blocks.get(key(name))
        if comes:
            block = put(blocks, BlockMeta(key(name), key(parent), position))
        elif block is not None and block.tiers:
            drop(blocks, block)
        blocks.check_invariants()
        for block in blocks:
            assert len(Blocks.path(block)) <= 5
            assert len(Blocks.followers(block)) <= 5


@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(0, 4))
def test_missing_blocks_are_remembered_within_a_limit(
    comes: list[int], goes: list[int], most: int
) -> None:
    blocks = Blocks()
    blocks.most_missing = most
    metas = [meta for name in "abc" for meta in chain(name, 4)]
    for i in comes:
        put(blocks, metas[i])
        blocks.check_invariants()
    for i in goes:
        block = blocks.get(metas[i].key)
        assert block is not None
        drop(blocks, block)
        blocks.check_invariants()
    assert not list(blocks)
