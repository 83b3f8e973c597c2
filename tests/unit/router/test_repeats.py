"""The repeat book: what prompts with one fork had computed where, of the last placements."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.core.repeats import RepeatBook


def test_sums_by_fork_and_slot() -> None:
    book = RepeatBook()
    book.placed(7, 0, 100)
    book.placed(7, 0, 20)
    book.placed(7, 1, 3)
    book.placed(8, 0, 5)
    book.placed(None, 2, 1000)
    assert book.at(7) == {0: 120, 1: 3}
    assert book.at(8) == {0: 5}
    assert book.at(9) == {}
    assert book.tokens == 1128


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.sampled_from([None, 1, 2]), st.integers(0, 2), st.integers(1, 9)), max_size=30
    ),
)
def test_only_the_last_ones_count(
    window: int, placements: list[tuple[int | None, int, int]]
) -> None:
    book = RepeatBook(window)
    for fork, slot, tokens in placements:
        book.placed(fork, slot, tokens)
        book.check_invariants()
    last = placements[-window:]
    assert book.tokens == sum(tokens for _, _, tokens in last)
    assert book.at(1).get(2, 0) == sum(t for fork, slot, t in last if (fork, slot) == (1, 2))
