"""What the simulated engine says, and the faults it takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from services.worker.core.model import Sampling
from services.worker.engines.sim.core.faults import Fault, FaultKind, faults_from
from services.worker.engines.sim.core.tokens import TokenStream, Vocabulary, prompt_positions

WORDS = Vocabulary(1000, eos=(2,), special=frozenset({0, 1, 2, 3}))
GREEDY = Sampling(max_tokens=100, temperature=0.0)


def text(tokens: list[int], count: int, sampling: Sampling = GREEDY, **more: object) -> list[int]:
    vocabulary = more.pop("vocabulary", WORDS)
    stream = TokenStream(vocabulary, tokens, sampling, **more)  # type: ignore[arg-type]
    return [stream.next() for _ in range(count)]


def test_text_depends_on_all_of_the_text_before_it() -> None:
    whole = text([5, 6, 7], 20)
    assert text([5, 6, 7, *whole[:8]], 12) == whole[8:]
    assert text([6, 5, 7], 20) != whole
    assert text([5, 6, 7], 20, adapter="a") != whole
    assert len(set(whole)) > 10


def test_special_ids_never_come_by_chance() -> None:
    tokens = text([9], 5000)
    assert not set(tokens) & WORDS.special
    assert all(0 <= t < WORDS.size for t in tokens)


def test_both_ways_of_asking_say_the_same() -> None:
    plain = text([9], 30)
    stream = TokenStream(WORDS, [9], replace(GREEDY, logprobs=3))
    positions = [stream.next_position() for _ in range(30)]
    assert [p.token_id for p in positions] == plain
    assert all(p.rank == 1 and p.top_token_ids[0] == p.token_id for p in positions)


def test_answers_end_after_their_mean_length_on_average() -> None:
    vocabulary = replace(WORDS, mean_output_tokens=20)
    lengths = []
    for start in range(400):
        stream = TokenStream(vocabulary, [start % 1000, start], GREEDY)
        lengths.append(next(i for i in range(1, 10_000) if stream.ends(stream.next())))
    assert 15 < sum(lengths) / len(lengths) < 26
    assert 2 not in text([9], 2000, replace(GREEDY, ignore_eos=True), vocabulary=vocabulary)
    early = text([9], 200, replace(GREEDY, min_tokens=200), vocabulary=vocabulary)
    assert 2 not in early


def test_chance_needs_a_temperature_and_a_seed_repeats_it() -> None:
    hot = replace(GREEDY, temperature=1.0)
    assert text([9], 20, draw=1) == text([9], 20, draw=2)
    assert text([9], 20, hot, draw=1) != text([9], 20, hot, draw=2)
    seeded = replace(hot, seed=-5)
    assert text([9], 20, seeded, draw=1) == text([9], 20, seeded, draw=2)


def test_a_prompts_positions_are_those_of_its_text() -> None:
    said = text([9, 8], 3)
    positions = prompt_positions(WORDS, [9, 8, *said], 2)
    assert [p.token_id for p in positions] == [8, *said]
    assert [p.rank for p in positions[1:]] == [1, 1, 1]
    assert all(len(p.top_token_ids) == 2 for p in positions)


def test_faults_come_from_tables() -> None:
    read = faults_from(
        [
            {"kind": "stall", "at_s": 5, "for_s": 2, "workers": [1, 3]},
            {"kind": "drop", "share": 0.1},
        ]
    )
    assert read == (
        Fault(FaultKind.STALL, 5.0, 2.0, workers=(1, 3)),
        Fault(FaultKind.DROP, share=0.1),
    )
    assert [read[0].concerns(w) for w in range(4)] == [False, True, False, True]
    assert read[1].concerns(7) and read[1].for_s == math.inf


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ("stall", "object"),
        ({"kind": "explode"}, "explode"),
        ({"at_s": 1}, "kind"),
        ({"kind": "slow", "speed": 1}, "speed"),
        ({"kind": "slow", "factor": 0}, "factor"),
        ({"kind": "slow", "factor": "x"}, "factor"),
        ({"kind": "drop", "share": 1.5}, "share"),
        ({"kind": "stall", "at_s": -1}, "at_s"),
        ({"kind": "stall", "for_s": math.nan}, "for_s"),
        ({"kind": "die", "workers": [-1]}, "workers"),
        ({"kind": "die", "workers": 1}, "workers"),
    ],
)
def test_wrong_faults_are_refused_by_name(row: object, word: str) -> None:
    with pytest.raises(ValueError, match=f"fault 0.*{word}"):
        faults_from([row])
