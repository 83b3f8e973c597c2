"""Server-sent events: framing, and the loop that turns a generation's news into them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from services.gateway.core.usage import Usage
from services.gateway.http.exchange import Exchange, encode
from services.gateway.pipeline import Generation, Update

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class Chunks(Protocol):
    """Renders one kind of stream."""

    def opening(self) -> Iterable[object]:
        """Chunks that come before any news."""
        ...

    def news(self, update: Update) -> Iterable[object]:
        """Chunks for what a choice gained."""
        ...

    def usage(self, usage: Usage) -> object:
        """The chunk that tells the usage, with no choices."""
        ...


_LINE_ENDS = tuple(
    (character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\x85\u2028\u2029"
)
"""What many clients take for the end of a line, though neither SSE nor JSON does."""


def event(value: object) -> bytes:
    """One event of JSON."""
    data = encode(value)
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


async def stream(
    exchange: Exchange,
    generation: Generation,
    chunks: Chunks,
    *,
    headers: Callable[[], Mapping[str, str]],
    include_usage: bool,
    keep_alive_s: float,
    observe: Callable[[list[Update]], None],
) -> None:
    """Writes a generation as events, one write for each engine step that brought news.

    The answer begins with the first news, so that what fails before is still a plain HTTP error;
    with `keep_alive_s` it begins after that much silence at the latest, by a comment.
    """
    events = [event(c) for c in chunks.opening()]
    while not generation.finished:
        if keep_alive_s:
            updates = await _or_comments(exchange, generation, headers, keep_alive_s)
        else:
            updates = await generation.updates()
        observe(updates)
        for update in updates:
            events += [event(c) for c in chunks.news(update)]
        if not exchange.status:
            await exchange.start_stream(headers())
        if generation.finished:
            if include_usage:
                events.append(event(chunks.usage(generation.usage)))
            events.append(DONE)
            await exchange.end_stream(b"".join(events))
        elif events:
            await exchange.write(b"".join(events))
        events = []


async def _or_comments(
    exchange: Exchange,
    generation: Generation,
    headers: Callable[[], Mapping[str, str]],
    interval_s: float,
) -> list[Update]:
    """The next news; a comment after each interval without any."""
    news = asyncio.ensure_future(generation.updates())
    try:
        while True:
            done, _ = await asyncio.wait({news}, timeout=interval_s)
            if done:
                return news.result()
            if not exchange.status:
                await exchange.start_stream(headers())
            await exchange.write(KEEP_ALIVE)
    finally:
        if not news.done():
            news.cancel()
            await asyncio.wait({news})
