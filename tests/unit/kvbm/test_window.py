"""The export window against a naive map of its bytes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.kvbm.core.window import PAGE, Window

PAGES = 32


class WindowMachine(RuleBasedStateMachine):
    """Each page belongs to one export or to none, whatever is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(PAGES * PAGE)
        self.owner: list[int | None] = [None] * PAGES
        self.expires: dict[int, float] = {}
        self.last = 0
        self.now = 0.0

    @rule(length=st.integers(1, 5 * PAGE), most=st.integers(0, 9))
    def take(self, length: int, most: int) -> None:
        self.last += 1
        pages = -(-length // PAGE)
        fitting, run = 0, 0
        for owner in [*self.owner, 0]:
            if owner is None:
                run += 1
            else:
                fitting, run = fitting + run // pages, 0
        pieces = self.window.take(self.last, length, most)
        assert len(pieces) == min(most, fitting)
        for piece in pieces:
            assert piece.length == pages * PAGE and piece.offset % PAGE == 0
            for page in range(piece.offset // PAGE, (piece.offset + piece.length) // PAGE):
                assert self.owner[page] is None, "room that is in use was given away"
                self.owner[page] = self.last
        if pieces:
            self.expires[self.last] = float("inf")

    @rule(number=st.integers(0, 40))
    def end(self, number: int) -> None:
        assert self.window.end(number) is (number in self.expires)
        self.gone({number})

    @rule(number=st.integers(0, 40), after=st.integers(0, 5))
    def filled(self, number: int, after: int) -> None:
        if number in self.expires:
            self.expires[number] = self.now + after
            self.window.filled(number, self.now + after)

    @rule(seconds=st.integers(0, 3))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        late = {id for id, at in self.expires.items() if at <= self.now}
        assert self.window.expire(self.now) == len(late)
        self.gone(late)

    def gone(self, exports: set[int]) -> None:
        for export in exports:
            self.expires.pop(export, None)
        self.owner = [None if owner in exports else owner for owner in self.owner]

    @invariant()
    def sums(self) -> None:
        self.window.check_invariants()
        assert len(self.window) == len(self.expires)
        assert self.window.used == PAGE * sum(owner is not None for owner in self.owner)


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_export_that_is_being_filled_does_not_expire() -> None:
    window = Window(4 * PAGE)
    assert len(window.take(1, PAGE, 9)) == 4
    assert window.expire(1e12) == 0 and window.take(2, PAGE, 1) == []
    window.filled(1, 5.0)
    assert window.expire(4.9) == 0
    assert window.expire(5.0) == 1 and window.used == 0
    assert not window.end(1)


def test_a_window_of_no_whole_page_has_no_room() -> None:
    window = Window(PAGE - 1)
    assert window.size == 0 and window.take(1, 1, 1) == []
    window.check_invariants()


def test_a_name_is_given_once() -> None:
    window = Window(4 * PAGE)
    window.take(1, PAGE, 1)
    with pytest.raises(AssertionError):
        window.take(1, PAGE, 1)
