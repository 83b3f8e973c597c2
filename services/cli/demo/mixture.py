"""The load of `forebay demo disagg`: some people chat on while others send long prompts.

Pure: the same numbers give the same prompts.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.cli.demo.visits import handbook

_CHATS = (
    "Tell a long story about a river and its keeper.",
    "List everything that one can do with a bucket of water.",
    "Describe a small town by a lake, house by house.",
    "Count slowly from one to five hundred, in words.",
    "Write the diary of a turbine, one line for each day.",
    "Explain how rain becomes electricity, step by step.",
    "Invent forty names for boats, and say why each fits.",
    "Recall all the rules of a game that nobody plays any more.",
)
STREAMS = len(_CHATS)
"""Requests that decode all the time."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """What is sent: chats at once, long prompts one by one."""

    chats: tuple[str, ...]
    chat_tokens: int
    """New tokens of each chat."""
    longs: tuple[str, ...]
    every_s: float
    """Seconds between two long prompts."""


def long_prompts(
    number: int, tokens: int, count: Callable[[str], int], *, seed: int = 11
) -> tuple[str, ...]:
    """Prompts of about `tokens` tokens (by `count`), each a text that no other begins with."""
    rng = random.Random(seed)
    return tuple(_long(n, tokens, count, rng) for n in range(number))


def _long(number: int, tokens: int, count: Callable[[str], int], rng: random.Random) -> str:
    sentences = list(handbook())
    head = f"Report {number + 1} of {rng.randrange(10_000)}. Sum it up in one sentence.\n"
    each = count(" ".join(sentences)) / len(sentences)
    wanted = max(1, round((tokens - count(head)) / each))
    chosen: list[str] = []
    while len(chosen) < wanted:
        rng.shuffle(sentences)
        chosen += sentences
    return head + " ".join(chosen[:wanted])


def mixture(longs: Sequence[str], prefill_s: float, itl_s: float, share: float) -> Mixture:
    """A load at `share` of what one worker can prefill; the chats last until all have come.

    prefill_s: seconds of one long prompt alone. itl_s: time between tokens with all chats running.
    """
    every_s = prefill_s / share
    lasts_s = (len(longs) - 1) * every_s + 2 * prefill_s
    return Mixture(_CHATS, max(32, round(lasts_s / itl_s)), tuple(longs), every_s)


def chat(number: int) -> str:
    """The prompt of a chat."""
    return _CHATS[number]
