"""The load of `forebay demo disagg`, and what is read from its answers."""

from pathlib import Path

import pytest

from services.cli.adapters.http import ChatAnswer
from services.cli.demo.disagg import Leg, Moved, Result
from services.cli.demo.disagg_picture import draw
from services.cli.demo.mixture import STREAMS, chat, long_prompts, mixture
from services.cli.errors import CliError


def words(text: str) -> int:
    return len(text.split())


def answer(first_s: float, *gaps_s: float, ttft_s: float = 1.0, tokens: str = "abc") -> ChatAnswer:
    arrivals = [first_s]
    for gap in gaps_s:
        arrivals.append(arrivals[-1] + gap)
    return ChatAnswer("", "w", 1, 1, 0, 0, ttft_s, tuple(tokens), tuple(arrivals))


def test_long_prompts_have_the_length_asked_for_and_begin_differently() -> None:
    prompts = long_prompts(5, 700, words)
    assert prompts == long_prompts(5, 700, words)
    assert all(abs(words(p) - 700) < 70 for p in prompts)
    assert len({p[:24] for p in prompts}) == 5


def test_a_load_is_the_share_of_what_one_worker_can_prefill() -> None:
    load = mixture(("a", "b", "c"), prefill_s=3.0, itl_s=0.1, share=0.6)
    assert load.every_s == pytest.approx(5.0)
    # The chats last until the third one, sent after 10 s, has had twice its time.
    assert load.chat_tokens == 160
    assert len(load.chats) == STREAMS == len({chat(n) for n in range(STREAMS)})


def test_only_gaps_while_long_prompts_are_about_count() -> None:
    chats = (answer(9.0, 0.5, 0.7, 0.1, 5.0),)
    leg = Leg("x", chats, (answer(12.0, ttft_s=2.0),), began_s=10.0, ended_s=12.0)
    assert [round(gap, 3) for _, gap in leg.gaps] == [0.7, 0.1]
    assert leg.itl_ms(0.99) == pytest.approx(700)
    assert leg.to_json()["ttft_p50_s"] == 2.0


def leg(gap: float, moved: tuple[Moved, ...] = (), tokens: str = "abc") -> Leg:
    return Leg("x", (answer(1.0, gap, gap, tokens=tokens),), (answer(5.0),), 0.0, 9.0, moved)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    load = mixture(("a",), 1.0, 0.1, 0.6)
    draw(Result(load, 1.0, {128: leg(0.4)}, leg(0.1)), "a model", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(CliError, match="can't be written"):
        draw(Result(load, 1.0, {128: leg(0.4)}, leg(0.1)), "a model", tmp_path / "no" / "x.png")


def test_the_published_form() -> None:
    load = mixture(("a",), 1.0, 0.1, 0.6)
    apart = leg(0.1, (Moved(4_000_000_000, 1.0), Moved(2_000_000_000, 1.0)))
    result = Result(load, 1.0, {128: leg(0.4), 256: leg(0.3)}, apart)
    told = result.to_json()
    assert told["aggregated"]["max_num_batched_tokens"] == result.best == 256
    assert told["aggregated"]["itl_p99_ms"] == pytest.approx(300)
    assert told["disaggregated"]["transfers"] == 2
    assert told["disaggregated"]["transfer_gb_s"] == 3.0
    assert told["tokens_equal"] is True
    for chats, equal in (("abd", False), ("", False), ("ab", True)):
        other = Result(load, 1.0, {128: leg(0.4, tokens=chats)}, apart)
        assert other.to_json()["tokens_equal"] is equal, "chats are compared as far as they came"
