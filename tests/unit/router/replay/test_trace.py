"""Traces: both forms are read, what is wrong is named, turns find the answers they wait for."""

import json
from pathlib import Path

import pytest

from services.router.replay.trace import (
    TraceError,
    TraceRequest,
    jittered,
    numbered,
    read_trace,
    sped_up,
    with_think_time,
)
from tests.support.traces import made_trace, write_trace


def mooncake(**changes: object) -> str:
    row = {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [4, 5]}
    return json.dumps(row | changes)


def test_mooncake_rows_are_sorted_and_numbered(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(mooncake() + "\n\n" + mooncake(timestamp=0, hash_ids=[9]) + "\n")
    assert read_trace(path) == [
        TraceRequest(0, 0.0, 700, 3, (9,)),
        TraceRequest(1, 1.5, 700, 3, (4, 5)),
    ]


def test_a_made_trace_survives_its_file(tmp_path: Path) -> None:
    made = made_trace(3, sessions=20)
    read = read_trace(write_trace(made, tmp_path / "t.jsonl"))
    assert [(r.input_tokens, r.blocks) for r in read] == [(r.input_tokens, r.blocks) for r in made]


def test_azure_rows_share_no_prefix(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.2319600,110,27\n"
    )
    one, two = read_trace(path)
    assert (one.input_tokens, one.output_tokens, len(one.blocks)) == (4808, 10, 10)
    assert two.arrival_s == pytest.approx(0.252)
    assert not set(one.blocks) & set(two.blocks)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no requests"),
        ("{", ":1 is not a request"),
        (mooncake() + "\n" + json.dumps({"timestamp": 1}), ":2 is not a request"),
        (mooncake(input_length=0), ":1 has a length"),
        (mooncake(hash_ids=7), ":1 is not a request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", ":2 is not a row"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing can't be read"):
        read_trace(tmp_path / "nothing")


def test_load_and_jitter_move_arrivals_only() -> None:
    made = made_trace(1, sessions=30)
    fast = sped_up(made, 4)
    assert [r.arrival_s * 4 for r in fast] == pytest.approx([r.arrival_s for r in made])
    spread = jittered(made, 3.0, seed=2)
    assert spread == jittered(made, 3.0, seed=2) != jittered(made, 3.0, seed=3)
    assert sorted(r.blocks for r in spread) == sorted(r.blocks for r in made)
    late = sum(b.arrival_s - a.arrival_s for a, b in zip(made, spread, strict=True)) / len(made)
    assert 1 < late < 2


def request(at: float, tokens: int, output: int, *blocks: int) -> TraceRequest:
    return TraceRequest(0, at, tokens, output, blocks)


def test_a_turn_waits_for_the_answer_before() -> None:
    first = request(0, 1100, 100, 1, 2, 91)
    second = request(30, 1700, 100, 1, 2, 3, 92)
    third = request(70, 2100, 100, 1, 2, 3, 4, 93)
    turns = with_think_time(numbered([first, second, third]), prefill_tps=1000, tpot_s=0.01)
    assert [t.parent for t in turns] == [None, 0, 1]
    assert turns[1].think_s == pytest.approx(30 - 1.1 - 1)
    assert turns[2].think_s == pytest.approx(40 - 1.7 - 1)


def test_a_shared_system_prompt_makes_nobody_wait() -> None:
    users = [request(i, 600 + 300 * i, 10, 1, 50 + i) for i in range(4)]
    # Only the first that has it could be gone on from, by its own user.
    turns = with_think_time(numbered(users), 1000, 0.01)
    assert {t.parent for t in turns} <= {None, 0}
    assert [t.parent for t in turns[2:]] == [None, None]


def test_no_turn_without_room_for_the_answer() -> None:
    turns = with_think_time(
        numbered([request(0, 1100, 500, 1, 2, 91), request(5, 1300, 1, 1, 2, 92)]), 1000, 0.01
    )
    assert turns[1].parent is None
