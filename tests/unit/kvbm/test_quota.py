"""Quotas: never negative, never beyond the limit but by force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.events.model import Tier
from services.kvbm.core.quota import QuotaBook, QuotaError

G2, G3 = Tier.G2, Tier.G3


def test_a_tenant_has_its_own_limit_or_everybody_elses_or_none() -> None:
    book = QuotaBook({(7, G2): 100, (None, G2): 10})
    assert book.limit(7, G2) == 100
    assert book.limit(8, G2) == book.limit(9, G2) == 10
    assert book.limit(7, G3) is None
    assert book.limit(0, G2) is None, "nobody's blocks have no quota"
    book.charge(8, G2, 10)
    assert not book.room(8, G2, 1)
    assert book.room(9, G2, 10), "each other tenant has the limit for itself"


def test_one_book_counts_over_all_namespaces_and_refuses_the_byte_too_many() -> None:
    book = QuotaBook({(7, G2): 100})
    book.charge(7, G2, 60)
    book.charge(7, G2, 40)
    with pytest.raises(QuotaError):
        book.charge(7, G2, 1)
    book.charge(7, G3, 1000)
    assert book.use() == {(7, G2): 100, (7, G3): 1000}
    book.refund(7, G2, 100)
    assert book.use() == {(7, G3): 1000}


def test_a_limit_of_zero_keeps_a_tenant_out() -> None:
    book = QuotaBook({(7, G2): 0})
    assert not book.room(7, G2, 1)
    assert book.room(7, G2, 0)


def test_adoption_charges_by_force_and_shows_what_is_over() -> None:
    book = QuotaBook({(7, G2): 100})
    book.charge(7, G2, 130, force=True)
    assert book.over(7, G2) == 30
    assert not book.room(7, G2, 0)
    book.refund(7, G2, 31)
    assert book.over(7, G2) == 0
    assert book.room(7, G2, 1)


def test_more_than_was_charged_cannot_be_refunded() -> None:
    book = QuotaBook({})
    book.charge(7, G2, 10)
    for bytes in (11, -1):
        with pytest.raises(QuotaError):
            book.refund(7, G2, bytes)
    with pytest.raises(QuotaError):
        book.charge(7, G2, -1)
    assert book.used(7, G2) == 10


def test_a_negative_limit_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="below 0"):
        QuotaBook({(7, G2): -1})


@given(
    st.dictionaries(
        st.tuples(st.sampled_from([None, 1, 2]), st.sampled_from([G2, G3])), st.integers(0, 50)
    ),
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 3), st.sampled_from([G2, G3]), st.integers(-5, 40)),
        max_size=60,
    ),
)
def test_the_book_agrees_with_a_naive_one_and_is_never_negative(
    limits: dict[tuple[int | None, Tier], int], steps: list[tuple[bool, int, Tier, int]]
) -> None:
    book, naive = QuotaBook(limits), dict[tuple[int, Tier], int]()
    for charge, tenant, tier, bytes in steps:
        used = naive.get((tenant, tier), 0)
        limit = None
        if tenant:
            limit = limits.get((tenant, tier), limits.get((None, tier)))
        if charge:
            fits = bytes >= 0 and (limit is None or used + bytes <= limit)
            after = used + bytes
        else:
            fits, after = 0 <= bytes <= used, used - bytes
        if fits:
            (book.charge if charge else book.refund)(tenant, tier, bytes)
            naive[tenant, tier] = after
        else:
            with pytest.raises(QuotaError):
                (book.charge if charge else book.refund)(tenant, tier, bytes)
        book.check_invariants()
        assert book.use() == {of: count for of, count in naive.items() if count}
        assert limit is None or book.used(tenant, tier) <= limit
