"""What waits for a caller: nothing lost, nothing reordered, everything bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.backlog import Backlog
from services.worker.core.model import Delta, Failure, FinishReason, PositionLogprobs

FAILURE = Failure(8, "OVERLOADED", "too slow")


def test_news_of_a_step_are_one_frame() -> None:
    backlog = Backlog(100, 1000)
    backlog.push(4, Delta("a", (1,), cached_tokens=32))
    backlog.push(4, Delta("b", (2,)))
    frame = backlog.take()
    assert frame is not None
    assert (frame.step, [d.request_id for d in frame.deltas]) == (4, ["a", "b"])
    assert frame.deltas[0].cached_tokens == 32
    assert backlog.take() is None


def test_news_of_several_steps_are_merged() -> None:
    backlog = Backlog(100, 1000)
    position = PositionLogprobs(1, -0.5, 1)
    backlog.push(1, Delta("a", (1,), (position,), cached_tokens=0))
    backlog.push(2, Delta("a", (2, 3), (position, position)))
    backlog.push(3, Delta("a", (4,), finish=FinishReason.STOP, stop_token_id=4))
    frame = backlog.take()
    assert frame is not None
    assert frame.step == 3
    (delta,) = frame.deltas
    assert delta.token_ids == (1, 2, 3, 4)
    assert len(delta.logprobs) == 3
    assert (delta.cached_tokens, delta.stop_token_id) == (0, 4)
    assert delta.finish is FinishReason.STOP


def test_a_share_over_its_bound_is_cut_and_others_are_not() -> None:
    backlog = Backlog(10, 1000)
    assert all(backlog.push(i, Delta("slow", (i,))) for i in range(5))
    assert not backlog.push(5, Delta("slow", (5,)))
    assert backlog.push(5, Delta("other", (1,)))
    backlog.cut("slow", FAILURE)
    frame = backlog.take()
    assert frame is not None
    slow, other = frame.deltas
    assert (slow.finish, slow.failure, slow.token_ids) == (
        FinishReason.ERROR,
        FAILURE,
        (0, 1, 2, 3, 4, 5),
    )
    assert other.finish is None


def test_one_large_delta_and_a_last_one_always_fit() -> None:
    backlog = Backlog(3, 1000)
    assert backlog.push(1, Delta("a", tuple(range(50))))
    assert backlog.push(2, Delta("a", (1,), finish=FinishReason.LENGTH))


def test_news_after_the_end_are_a_bug() -> None:
    backlog = Backlog(100, 1000)
    backlog.push(1, Delta("a", (1,), finish=FinishReason.STOP))
    with pytest.raises(ValueError, match="after its last"):
        backlog.push(2, Delta("a", (2,)))


PUSHES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.booleans()), max_size=40)


@given(PUSHES, st.integers(1, 30))
def test_whatever_the_reader_does_all_tokens_arrive_in_order(
    pushes: list[tuple[str, int, bool]], frame_limit: int
) -> None:
    backlog = Backlog(10**6, frame_limit)
    sent: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}

    def read() -> bool:
        frame = backlog.take()
        for delta in frame.deltas if frame else ():
            got.setdefault(delta.request_id, []).extend(delta.token_ids)
        if frame and len(frame.deltas) > 1:
            assert sum(d.cost for d in frame.deltas) <= frame_limit + len(pushes)
        return frame is not None

    for step, (name, count, reads) in enumerate(pushes):
        ids = tuple(range(step * 10, step * 10 + count))
        assert backlog.push(step, Delta(name, ids))
        sent.setdefault(name, []).extend(ids)
        if reads:
            read()
    while read():
        pass
    assert got == sent
    assert len(backlog) == 0
