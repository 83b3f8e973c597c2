import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.choice import NOTHING, Choice, ChoiceDelta
from services.gateway.core.logprobs import TokenLogprobs
from services.gateway.core.sampling import Sampling

EOS = 256


class ByteTokens:
    """Token i is byte i; 256 is special."""

    byte_exact = True
    strips_first_space = False

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < EOS else b"<eos>"

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = (i for i in token_ids if not (skip_special_tokens and self.is_special(i)))
        return b"".join(self.token_bytes(i) or b"" for i in kept).decode(errors="replace")


def choice(max_tokens: int = 1000, **sampling) -> Choice:
    return Choice(ByteTokens(), Sampling(max_tokens=max_tokens, **sampling), [1])


def ids(text: str) -> list[int]:
    return list(text.encode())


def probs(tokens: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(t, -float(i)) for i, t in enumerate(tokens)]


def run(
    subject: Choice, tokens: Sequence[int], finish=None, sizes: Sequence[int] = (), logprobs=False
) -> list[ChoiceDelta]:
    """Feeds in steps of `sizes`; the finish comes with the last."""
    deltas = []
    start = 0
    all_probs = probs(tokens) if logprobs else []
    steps = [*sizes]
    while start < len(tokens):
        end = min(len(tokens), start + (steps.pop(0) if steps else 1))
        reason = finish if end == len(tokens) else None
        deltas.append(subject.feed(tokens[start:end], all_probs[start:end], reason))
        start = end
    return deltas


def text_of(deltas: Sequence[ChoiceDelta]) -> str:
    return "".join(d.text for d in deltas)


def test_case_31_exactly_one_finish_reason() -> None:
    subject = choice()
    deltas = run(subject, ids("hello"), "length")
    assert [d.finish_reason for d in deltas] == [None] * 4 + ["length"]
    assert subject.feed(ids("more"), (), "stop") is NOTHING
    assert subject.finish_reason == "length"
    assert subject.completion_tokens == 5


def test_the_end_token_counts_and_is_not_shown() -> None:
    subject = choice(skip_special_tokens=False)
    deltas = run(subject, [*ids("hi"), EOS], "stop", logprobs=True)
    assert text_of(deltas) == "hi"
    assert subject.completion_tokens == 3
    assert subject.output_ids == [*ids("hi"), EOS]
    assert sum(len(d.logprobs) for d in deltas) == 2


def test_a_stop_token_is_shown_when_stops_are_included() -> None:
    subject = choice(include_stop_str=True)
    assert text_of(run(subject, ids("hi."), "stop")) == "hi."


def test_an_end_without_tokens_ends() -> None:
    subject = choice()
    assert subject.feed((), (), "stop") == ChoiceDelta("", (), "stop")


def test_case_38_a_stop_string_over_tokens_is_cut() -> None:
    subject = choice(stop=("STOP",))
    deltas = run(subject, ids("one STOP two"))
    assert text_of(deltas) == "one "
    assert deltas[7] == ChoiceDelta("", (), "stop")
    assert subject.completion_tokens == 8
    assert subject.finished


def test_case_38_include_stop_str() -> None:
    assert text_of(run(choice(stop=("STOP",), include_stop_str=True), ids("a STOP b"))) == "a STOP"


def test_case_39_a_stop_string_in_the_last_delta() -> None:
    subject = choice(stop=("b",))
    delta = subject.feed(ids("abc"), (), "length")
    assert delta == ChoiceDelta("a", (), "stop")
    assert subject.completion_tokens == 2


def test_a_half_stop_string_comes_out_at_the_end() -> None:
    assert text_of(run(choice(stop=("STOP",)), ids("one STO"), "length")) == "one STO"
    assert text_of(run(choice(stop=("STOP",)), [*ids("one STO"), EOS], "stop")) == "one STO"
    subject = choice(stop=("STOP",))
    before = text_of(run(subject, ids("one STO")))
    assert before == "one "
    assert subject.end() == ChoiceDelta("STO", (), "length")


def test_a_stop_string_within_min_tokens_does_not_count() -> None:
    subject = choice(stop=("ab",), min_tokens=4)
    assert text_of(run(subject, ids("ababab"))) == "abab"
    assert subject.completion_tokens == 6


def test_case_37_halves_wait_and_the_last_is_flushed() -> None:
    subject = choice()
    deltas = run(subject, [*ids("é😀"), 0xF0, 0x9F], "length")
    assert [d.text for d in deltas] == ["", "é", "", "", "", "😀", "", "\ufffd"]


@given(
    text=st.text(alphabet="abé😀", max_size=20),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=2),
    seed=st.integers(0, 1000),
    finish=st.sampled_from(["stop", "length"]),
)
def test_steps_change_nothing(text: str, stops: list[str], seed: int, finish) -> None:
    tokens = ids(text) + ([EOS] if finish == "stop" else [])
    rng = random.Random(seed)
    whole = choice(stop=tuple(stops))
    once = [whole.feed(tokens, probs(tokens), finish)]
    parts = choice(stop=tuple(stops))
    many = run(parts, tokens, finish, [rng.randint(1, 4) for _ in tokens], logprobs=True)
    if not tokens:
        return
    assert text_of(once) == text_of(many)
    assert [e for d in once for e in d.logprobs] == [e for d in many for e in d.logprobs]
    assert whole.finish_reason == parts.finish_reason
    assert whole.completion_tokens == parts.completion_tokens
    assert [d.finish_reason is not None for d in many].count(True) == 1


@given(
    text=st.text(alphabet="abé😀", min_size=1, max_size=20),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=2),
)
def test_case_32_log_probabilities_go_with_their_text(text: str, stops: list[str]) -> None:
    subject = choice(stop=tuple(stops))
    tokens = ids(text)
    deltas = run(subject, tokens, "length", logprobs=True)
    shown = ""
    spelled = b""
    for delta in deltas:
        shown += delta.text
        spelled += bytes(e.position.token_id for e in delta.logprobs)
        # Never ahead of the text, and only what is still held is behind it.
        assert len(spelled.decode(errors="replace")) <= len(shown)
        assert all(e.text_offset <= len(shown) for e in delta.logprobs)
    assert spelled.decode() == shown
    if not stops:
        assert len(spelled) == len(tokens)


def test_log_probabilities_must_match_the_tokens() -> None:
    with pytest.raises(ValueError, match="zip"):
        choice().feed([1, 2], probs([1]))


def test_an_attempt_that_broke_at_the_limit_is_not_resumed() -> None:
    subject = choice(max_tokens=2)
    subject.feed(ids("a"))
    assert not subject.at_limit
    subject.feed(ids("b"))
    assert subject.at_limit
    assert subject.end("length").finish_reason == "length"


def test_a_choice_goes_on_over_attempts() -> None:
    subject = choice(stop=("ab",))
    first = subject.feed(ids("xa"))
    prior = list(subject.output_ids)
    second = subject.feed(ids("b"))
    assert first.text + second.text == "x"
    assert prior == ids("xa")
    assert second.finish_reason == "stop"
