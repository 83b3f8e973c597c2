"""The request book: each admitted request ends exactly once, with true counts."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from services.common.events.model import RequestAdmitted, RequestFinished, RequestFirstToken
from services.common.ids import AttemptId, BlockKey
from services.worker.core.requests import RequestBook


def test_a_life() -> None:
    book = RequestBook()
    admitted = book.admit("1", AttemptId("att"), 70, 8, [BlockKey(5)], 1)
    assert admitted == RequestAdmitted(AttemptId("att"), 70, 8, [BlockKey(5)], 1)
    assert book.pending_prefill_tokens() == 70
    assert book.advance("1", 1, 64, finished=False) == [RequestFirstToken(AttemptId("att"), 64, 1)]
    assert book.pending_prefill_tokens() == 0
    assert book.advance("1", 2, None, finished=False) == []
    assert book.requests()[0].decoding
    assert book.advance("1", 1, None, finished=True) == [
        RequestFinished(AttemptId("att"), 64, 4, False, 1)
    ]
    assert "1" not in book
    assert book.requests() == ()


def test_first_and_last_token_in_one_step() -> None:
    book = RequestBook()
    book.admit("1", AttemptId("a"), 3, 1, [])
    events = book.advance("1", 1, 0, finished=True)
    assert [type(e) for e in events] == [RequestFirstToken, RequestFinished]


def test_aborted_before_its_first_token() -> None:
    book = RequestBook()
    book.admit("1", AttemptId("a"), 3, 1, [])
    assert book.advance("1", 0, None, finished=True, aborted=True) == [
        RequestFinished(AttemptId("a"), 0, 0, True)
    ]


def test_news_of_strangers_are_nothing_and_ids_are_unique() -> None:
    book = RequestBook()
    assert book.advance("9", 1, 0, finished=True) == []
    book.admit("1", AttemptId("a"), 3, 1, [])
    with pytest.raises(ValueError, match="already"):
        book.admit("1", AttemptId("b"), 3, 1, [])


class BookMachine(RuleBasedStateMachine):
    """Any order of admissions, news and ends, with late news of ended requests."""

    running: Bundle[str] = Bundle("running")
    ended: Bundle[str] = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.book = RequestBook()
        self.count = 0
        self.produced: dict[str, int] = {}
        self.firsts: set[str] = set()

    @rule(target=running)
    def admit(self) -> str:
        self.count += 1
        id = str(self.count)
        self.book.admit(id, AttemptId(f"att-{id}"), 10, 5, [])
        self.produced[id] = 0
        return id

    @rule(id=running, tokens=st.integers(0, 3))
    def news(self, id: str, tokens: int) -> None:
        events = self.book.advance(id, tokens, None, finished=False)
        self.produced[id] += tokens
        if tokens and id not in self.firsts:
            self.firsts.add(id)
            assert [type(e) for e in events] == [RequestFirstToken]
        else:
            assert events == []

    @rule(target=ended, id=consumes(running), tokens=st.integers(0, 2), aborted=st.booleans())
    def end(self, id: str, tokens: int, aborted: bool) -> str:
        events = self.book.advance(id, tokens, None, finished=True, aborted=aborted)
        last = events[-1]
        assert isinstance(last, RequestFinished)
        assert (last.output_tokens, last.aborted) == (self.produced.pop(id) + tokens, aborted)
        return id

    @rule(id=ended, finished=st.booleans())
    def late(self, id: str, finished: bool) -> None:
        assert self.book.advance(id, 1, 1, finished=finished) == []

    @invariant()
    def book_is_sound(self) -> None:
        self.book.check_invariants()
        assert set(self.book.ids()) == set(self.produced)
        assert len(self.book) == len(self.book.requests())


BookMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestBook = BookMachine.TestCase
