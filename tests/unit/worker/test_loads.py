"""When loads are told."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.common.events.model import LoadReport
from services.worker.core.loads import Due, LoadBook


def busy(running: int, steps: int = 0, rank: int = 0) -> LoadReport:
    return LoadReport(running_requests=running, steps=steps, dp_rank=rank)


def test_changes_are_told_once_and_not_too_often() -> None:
    book = LoadBook(1, 50, 1.0)
    book.update(busy(1, 1))
    assert book.due(10.0) == Due((replace(busy(1, 1), total_blocks=50),))
    book.update(busy(1, 2))
    assert book.due(10.1) == Due()
    book.update(busy(2, 3))
    assert book.due(10.25) == Due((), 0.75)
    book.update(busy(3, 4))
    assert [r.running_requests for r in book.due(11.0).reports] == [3]


def test_idle_is_told_at_once() -> None:
    book = LoadBook(1, 50, 1.0)
    book.update(busy(1, 1))
    book.due(10.0)
    book.update(busy(0, 2))
    assert [r.running_requests for r in book.due(10.001).reports] == [0]


def test_death_is_idle() -> None:
    book = LoadBook(2, 50, 1.0)
    book.update(busy(4, 7, 1))
    book.due(0.0)
    assert [(r.running_requests, r.total_blocks) for r in book.clear()] == [(0, 50), (0, 50)]
    assert [r.dp_rank for r in book.due(0.001).reports] == [1]


NEWS = st.lists(st.tuples(st.floats(0.001, 2.0), st.integers(0, 1), st.integers(0, 3)))


@given(NEWS)
def test_the_last_told_is_true_in_the_end(news: list[tuple[float, int, int]]) -> None:
    book = LoadBook(2, 10, 1.0)
    heard: dict[int, int] = {}
    now = 0.0
    for pause, rank, running in news:
        now += pause
        book.update(busy(running, rank=rank))
        heard.update((r.dp_rank, r.running_requests) for r in book.due(now).reports)
    due = book.due(now)
    if due.again_s is not None:
        assert 0 < due.again_s <= 1.0
        due = book.due(now + due.again_s)
    heard.update((r.dp_rank, r.running_requests) for r in due.reports)
    assert heard == {r.dp_rank: r.running_requests for r in book.reports()} or not news
