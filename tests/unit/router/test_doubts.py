"""Digests that differ call for snapshots; one part's does not excuse another's."""

from services.router.core.doubts import Doubts
from services.router.core.index import Digest

HERE = Digest(2, 7)


def test_equal_digests_call_for_nothing() -> None:
    doubts = Doubts()
    doubts.compare("w", 0, HERE, 2, 7)
    assert not doubts.take("w")
    assert doubts.drifts == 0


def test_calls_get_rarer_for_each_part_by_itself() -> None:
    doubts = Doubts()
    calls = []
    for time in range(1, 10):
        doubts.compare("w", 0, HERE, 3, 7)
        doubts.compare("w", 1, HERE, 2, 7)
        if doubts.take("w"):
            calls.append(time)
        assert not doubts.take("w"), "once"
    assert calls == [1, 2, 4, 8]
    assert doubts.drifts == 9


def test_a_right_digest_or_a_farewell_starts_anew() -> None:
    doubts = Doubts()
    for _ in range(3):
        doubts.compare("w", 0, HERE, 2, 6)
    assert doubts.take("w")
    doubts.compare("w", 0, HERE, 2, 7)
    doubts.compare("w", 0, HERE, 2, 6)
    assert doubts.take("w")
    doubts.compare("w", 0, HERE, 2, 6)
    doubts.forget("w")
    assert not doubts.take("w")
    doubts.compare("w", 0, HERE, 2, 6)
    assert doubts.take("w")
