"""Headers by which clients say where their requests shall run."""

import pytest

from services.gateway.errors import BadRequest
from services.gateway.http.wishes import wishes_of
from services.gateway.ports import NO_WISHES, Wishes


def test_none() -> None:
    assert wishes_of({"x-request-id": "1"}) is NO_WISHES


def test_all() -> None:
    headers = {
        "x-session-id": " chat 7 ",
        "x-forebay-worker": "w1/3",
        "x-forebay-exclude": "w2, w3,",
        "x-forebay-labels": "zone=a, gpu = h100",
    }
    assert wishes_of(headers) == Wishes(
        "w1", 3, frozenset({"w2", "w3"}), {"zone": "a", "gpu": "h100"}, "chat 7"
    )


@pytest.mark.parametrize(
    ("given", "worker", "rank"), [("w1", "w1", None), ("a/b", "a/b", None), ("a/b/0", "a/b", 0)]
)
def test_worker_and_rank(given: str, worker: str, rank: int | None) -> None:
    wishes = wishes_of({"x-forebay-worker": given})
    assert (wishes.worker, wishes.rank) == (worker, rank)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-session-id", "x" * 257),
        ("x-forebay-worker", "x" * 257),
        ("x-forebay-exclude", "x," * 2049),
        ("x-forebay-labels", "zone"),
        ("x-forebay-labels", "=a"),
    ],
)
def test_what_can_not_be_right(name: str, value: str) -> None:
    with pytest.raises(BadRequest) as failure:
        wishes_of({name: value})
    assert failure.value.param == name
