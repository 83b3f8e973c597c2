"""Pins: what people want kept is kept, within limits, and no pin outlives its end."""

import pytest

from services.common.events.model import Tier
from services.kvbm.core.model import PinLimit, Selection
from tests.support.catalogs import ENGINE, catalog, chain, copy_down, key, keys, save

G2, G3 = Tier.G2, Tier.G3


def test_a_pinned_prefix_is_not_evicted() -> None:
    cat, metas, other = catalog(6), chain("a", 4), chain("b", 2)
    save(cat, metas + other)
    assert cat.pin(metas[2].key, "ops", 100, 11) == 3
    assert len(cat.grant(ENGINE, 8, 12)) == 3
    assert cat.run(keys(metas)) == [(G2,)] * 3 and cat.run(keys(other)) == []
    assert cat.counts().pins == 1
    view = cat.view(metas[1].key)
    assert view is not None and view.pins == 1
    cat.check_invariants()
    assert cat.unpin(metas[2].key, "somebody else") == 0
    assert cat.unpin(metas[2].key, "ops") == 1
    assert cat.unpin(metas[2].key, "ops") == 0
    assert len(cat.grant(ENGINE, 8, 13)) == 3
    cat.check_invariants()


def test_pins_expire_and_are_renewed() -> None:
    cat, metas = catalog(4), chain("a", 2)
    save(cat, metas)
    cat.pin(metas[1].key, "ops", 100, 11)
    assert cat.pin(metas[1].key, "ops", 200, 12) == 2
    cat.pin(metas[0].key, "ops", 150, 12)
    assert cat.expire(149).pins == 0
    assert cat.expire(150).pins == 1
    assert cat.counts().pins == 1
    assert len(cat.grant(ENGINE, 8, 151)) == 2
    assert cat.expire(200).pins == 1
    assert len(cat.grant(ENGINE, 8, 201)) == 2
    cat.check_invariants()


def test_owners_pin_by_themselves() -> None:
    cat, metas = catalog(4), chain("a", 2)
    save(cat, metas)
    cat.pin(metas[1].key, "a", 100, 11)
    cat.pin(metas[1].key, "b", 100, 11)
    cat.pin(metas[0].key, "b", 100, 11)
    assert cat.unpin(None, "b") == 2
    assert len(cat.grant(ENGINE, 8, 12)) == 2
    assert cat.unpin(None, "a") == 1
    assert len(cat.grant(ENGINE, 8, 12)) == 2
    cat.check_invariants()


def test_what_is_nowhere_can_not_be_pinned() -> None:
    cat, metas = catalog(4), chain("a", 3)
    assert cat.pin(metas[0].key, "ops", 100, 1) is None
    save(cat, metas)
    cat.forget(G2, metas[1].key, 11)
    assert cat.pin(metas[1].key, "ops", 100, 12) == 1, "what of it is here"
    assert cat.pin(metas[2].key, "ops", 100, 12) == 2
    assert cat.pin(key("?"), "ops", 100, 12) is None
    cat.check_invariants()


def test_pins_keep_no_more_than_their_share() -> None:
    cat, metas, other = catalog(8, pin_share=0.5), chain("a", 5), chain("b", 3)
    save(cat, metas + other)
    with pytest.raises(PinLimit, match="5 blocks of G2; at most 4"):
        cat.pin(metas[4].key, "ops", 100, 11)
    assert cat.counts().pins == 0
    assert cat.pin(metas[3].key, "ops", 100, 11) == 4
    with pytest.raises(PinLimit):
        cat.pin(other[0].key, "ops", 100, 11)
    assert cat.pin(metas[2].key, "else", 100, 11) == 3, "kept anyway"
    cat.check_invariants()
    cat.add_slots(G2, 2)
    assert cat.pin(other[0].key, "ops", 100, 12) == 1
    assert len(cat.grant(ENGINE, 8, 13)) == 5
    cat.check_invariants()


def test_the_best_copy_is_kept_and_others_as_far_as_there_is_room() -> None:
    cat, metas = catalog(8, 2, pin_share=0.5), chain("a", 2)
    save(cat, metas)
    copy_down(cat, metas)
    assert cat.pin(metas[1].key, "ops", 100, 21) == 2
    cat.check_invariants()
    cat.forget(G2, metas[0].key, 22)
    cat.forget(G2, metas[1].key, 22)
    cat.check_invariants()
    more = chain("b", 2)
    save(cat, more)
    copy_down(cat, more[:1], 23)
    assert (cat.tiers_of(metas[0].key) == ()) is not (cat.tiers_of(metas[1].key) == ())
    cat.check_invariants()


@pytest.mark.parametrize("how", ["clear", "forget", "expire"])
def test_no_pin_outlives_its_blocks(how: str) -> None:
    cat, metas = catalog(4), chain("a", 2, expires_ms=50)
    save(cat, metas)
    cat.pin(metas[1].key, "ops", 1000, 11)
    if how == "clear":
        cat.clear(Selection(prefix=metas[0].key), 12)
    elif how == "forget":
        for meta in metas:
            cat.forget(G2, meta.key, 12)
    else:
        cat.expire(50)
    assert cat.counts().pins == 0 and not list(cat.blocks())
    cat.check_invariants()
    save(cat, chain("a", 2), 60)
    assert len(cat.grant(ENGINE, 4, 61)) == 4, "a new block is not pinned"
    cat.check_invariants()


def test_a_block_promoted_later_is_kept_too() -> None:
    cat, metas = catalog(4, 4), chain("a", 2)
    save(cat, metas)
    copy_down(cat, metas)
    for meta in metas:
        cat.forget(G2, meta.key, 21)
    assert cat.pin(metas[1].key, "ops", 100, 22) == 2
    for meta in metas:
        copy = cat.begin_copy(meta.key, G3, G2, 23)
        assert copy is not None and cat.end_copy(copy, True, 23)
    assert len(cat.grant(ENGINE, 8, 24)) == 2
    assert cat.run(keys(metas)) == [(G2, G3)] * 2
    cat.check_invariants()
