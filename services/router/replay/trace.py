"""Traces: requests with arrival, lengths and prefix blocks, read from files. Knows no workers.

Two forms are read. Mooncake's JSON lines (kvcache-ai/Mooncake, FAST'25): `timestamp` (ms),
`input_length`, `output_length` (tokens), `hash_ids` (chained ids of 512-token blocks; the last one
may be partly filled). And the CSV of the Azure LLM inference traces of 2023
(Azure/AzurePublicDataset): `TIMESTAMP,ContextTokens,GeneratedTokens`, which tells nothing of
prefixes: no two requests share one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from random import Random

BLOCK_TOKENS = 512
"""Tokens of a trace's block."""
_AZURE_COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens"


class TraceError(Exception):
    """A trace can't be read; the message names file and line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    number: int
    """Its place in the order of arrival, from 0 on."""
    arrival_s: float
    """Since the trace's own zero."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of its prompt's blocks; equal ids mean equal tokens up to there."""
    parent: int | None = None
    """Number of the request whose answer this one waits for; None: it comes by the clock."""
    think_s: float = 0.0
    """Seconds between the parent's last token and this request."""


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a file, by arrival. Raises TraceError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise TraceError(f"{path} can't be read: {exc}") from exc
    if lines and lines[0].strip() == _AZURE_COLUMNS:
        requests = _read_azure(path, lines[1:])
    else:
        requests = _read_mooncake(path, lines)
    if not requests:
        raise TraceError(f"{path} has no requests")
    return numbered(requests)


def numbered(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """The requests by arrival, numbered anew, without parents."""
    ordered = sorted(requests, key=lambda r: r.arrival_s)
    return [replace(r, number=i, parent=None, think_s=0.0) for i, r in enumerate(ordered)]


def sped_up(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests, arriving `factor` times as fast."""
    return [replace(r, arrival_s=r.arrival_s / factor) for r in requests]


def jittered(requests: Sequence[TraceRequest], most_s: float, seed: int) -> list[TraceRequest]:
    """Each request up to `most_s` seconds later, uniformly: for clocks that tick coarsely."""
    dice = Random(seed)
    return numbered(replace(r, arrival_s=r.arrival_s + dice.random() * most_s) for r in requests)


def with_think_time(
    requests: Sequence[TraceRequest], prefill_tps: float, tpot_s: float
) -> list[TraceRequest]:
    """Turns of a conversation wait for the answer before, as people do.

    A request follows another when its prompt goes on from all of that one's full blocks, has room
    for that answer, and nobody before had that chain. The time to think is the recorded gap less
    what the earlier one takes alone, at `prefill_tps` tokens a second and `tpot_s` seconds a token.
    """
    owner: dict[int, int] = {}
    seen: set[int] = set()
    followed: list[TraceRequest] = []
    for request in requests:
        full = request.blocks[: request.input_tokens // BLOCK_TOKENS]
        parent = _parent(request, full, owner, requests)
        think = 0.0
        if parent is not None:
            alone = parent.input_tokens / prefill_tps + parent.output_tokens * tpot_s
            think = max(0.0, request.arrival_s - parent.arrival_s - alone)
            # It has been answered; who comes next follows the new turn.
            del owner[parent.blocks[parent.input_tokens // BLOCK_TOKENS - 1]]
        followed.append(
            replace(request, parent=None if parent is None else parent.number, think_s=think)
        )
        if full and full[-1] not in seen:
            owner[full[-1]] = request.number
        seen.update(full)
    return followed


def _parent(
    request: TraceRequest,
    full: Sequence[int],
    owner: Mapping[int, int],
    requests: Sequence[TraceRequest],
) -> TraceRequest | None:
    """The latest turn whose chain the prompt goes on from, if it has room for that answer."""
    for block in reversed(full):
        number = owner.get(block)
        if number is not None:
            before = requests[number]
            room = before.input_tokens + before.output_tokens
            return before if request.input_tokens >= room else None
    return None


def _read_mooncake(path: Path, lines: Sequence[str]) -> list[TraceRequest]:
    requests = []
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            request = TraceRequest(
                number=0,
                arrival_s=float(row["timestamp"]) / 1000,
                input_tokens=int(row["input_length"]),
                output_tokens=int(row["output_length"]),
                blocks=tuple(int(block) for block in row["hash_ids"]),
            )
        except (ValueError, TypeError, KeyError) as exc:
            raise TraceError(f"{path}:{i} is not a request in Mooncake's form: {exc!r}") from exc
        if request.input_tokens < 1 or request.output_tokens < 0 or request.arrival_s < 0:
            raise TraceError(f"{path}:{i} has a length or time below its least")
        requests.append(request)
    return requests


def _read_azure(path: Path, lines: Sequence[str]) -> list[TraceRequest]:
    requests = []
    start: datetime | None = None
    block = 0
    for i, line in enumerate(lines, 2):
        if not line.strip():
            continue
        try:
            stamp, context, generated = line.split(",")
            # Seven digits of a second: more than datetime takes.
            when = datetime.fromisoformat(stamp.strip()[:26])
            tokens, output = int(context), int(generated)
        except ValueError as exc:
            raise TraceError(f"{path}:{i} is not a row of an Azure trace: {exc}") from exc
        start = start or when
        if tokens < 1:
            continue
        blocks = tuple(range(block, block + -(-tokens // BLOCK_TOKENS)))
        block += len(blocks)
        arrival = max(0.0, (when - start).total_seconds())
        requests.append(TraceRequest(0, arrival, tokens, output, blocks))
    return requests
