"""Loads: one that swings between long prompts and long answers, and recorded traces.

A trace runs as many times as fast as makes, on the mean, about five workers' work: prompts at the
prefill rate, answers at the batch that keeps 25 ms between tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import cos, pi
from pathlib import Path
from random import Random

from services.router.replay.trace import (
    BLOCK_TOKENS,
    TraceRequest,
    jittered,
    numbered,
    read_trace,
    sped_up,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: mean lengths in tokens, and how many arrive in a second at most."""

    input_tokens: int
    output_tokens: int
    rate: float


LONG_PROMPTS = Kind(6000, 60, 7.8)
LONG_ANSWERS = Kind(400, 600, 18.2)


def swinging(
    seconds: float,
    period_s: float,
    seed: int = 1,
    kinds: tuple[Kind, Kind] = (LONG_PROMPTS, LONG_ANSWERS),
    scale: float = 1.0,
) -> list[TraceRequest]:
    """All the first kind at 0, all the second after half a period, and back, smoothly.

    Arrivals are random (Poisson), lengths uniform within half of their mean either way. No two
    prompts share anything.
    """
    dice = Random(seed)
    requests: list[TraceRequest] = []
    block = 0
    for turn, kind in enumerate(kinds):
        now = 0.0
        while True:
            now += dice.expovariate(kind.rate * scale)
            if now >= seconds:
                break
            share = 0.5 + 0.5 * cos(2 * pi * now / period_s)
            if dice.random() >= (share if turn == 0 else 1 - share):
                continue
            tokens = round(kind.input_tokens * dice.uniform(0.5, 1.5))
            output = max(2, round(kind.output_tokens * dice.uniform(0.5, 1.5)))
            count = -(-tokens // BLOCK_TOKENS)
            blocks = tuple(range(block, block + count))
            block += count
            requests.append(TraceRequest(0, now, tokens, output, blocks))
    return numbered(requests)


def from_file(
    path: Path, seconds: float, speed: float, *, tick_s: float = 0.0, seed: int = 1
) -> list[TraceRequest]:
    """The first part of a trace, so many seconds long once it runs `speed` times as fast."""
    requests = read_trace(path)
    if tick_s:
        requests = jittered(requests, tick_s, seed)
    return _first(sped_up(requests, speed), seconds)


def alternating(
    first: Sequence[TraceRequest], second: Sequence[TraceRequest], turn_s: float
) -> list[TraceRequest]:
    """Turns of the one and of the other, each going on where it stopped."""

    def turns(requests: Sequence[TraceRequest], offset: int, mark: int) -> list[TraceRequest]:
        return [
            replace(
                r,
                arrival_s=r.arrival_s + (r.arrival_s // turn_s + offset) * turn_s,
                # Blocks of two traces are different ones, whatever their numbers.
                blocks=tuple(b * 2 + mark for b in r.blocks),
            )
            for r in requests
        ]

    return numbered([*turns(first, 0, 0), *turns(second, 1, 1)])


def _first(requests: Sequence[TraceRequest], seconds: float) -> list[TraceRequest]:
    return numbered(r for r in requests if r.arrival_s < seconds)


@dataclass(frozen=True, slots=True)
class Load:
    """A load for eight workers of the default hardware, and the TTFT that suits its prompts."""

    name: str
    ttft_s: float
    requests: Callable[[float, Path], list[TraceRequest]]
    """So many seconds of it; traces come from the folder."""


def _azure_swing(seconds: float, folder: Path) -> list[TraceRequest]:
    code = from_file(folder / _CODE, seconds / 2, 8.0)
    conversations = from_file(folder / _CONV, seconds / 2, 4.5)
    return alternating(code, conversations, 120.0)


_CODE = "AzureLLMInferenceTrace_code.csv"
_CONV = "AzureLLMInferenceTrace_conv.csv"

LOADS = (
    Load("swing", 1.5, lambda seconds, _: swinging(seconds, 240.0)),
    Load("azure-swing", 1.5, _azure_swing),
    Load("azure-code", 1.5, lambda seconds, folder: from_file(folder / _CODE, seconds, 8.0)),
    Load("azure-conv", 1.5, lambda seconds, folder: from_file(folder / _CONV, seconds, 4.5)),
    Load(
        "conversation",
        8.0,
        lambda seconds, folder: from_file(
            # Its clock ticks every 3 s.
            folder / "conversation_dev.jsonl",
            seconds,
            1.0,
            tick_s=3.0,
        ),
    ),
    Load(
        "toolagent",
        5.0,
        lambda seconds, folder: from_file(folder / "toolagent_like_dev.jsonl", seconds, 1.0),
    ),
)
