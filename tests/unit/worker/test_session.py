"""A session's names: what ended is over only when its end was read."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.common.errors import InvalidRequest
from services.worker.core.model import Delta, FinishReason, Generation, Sampling
from services.worker.service import WorkerService
from services.worker.session import Session


class Service:
    """Takes every request; the test speaks for the engine."""

    step = 7

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def session_opened(self) -> None: ...

    def session_closed(self) -> None: ...

    async def start(self, generation: Generation, sink: Any) -> str:
        return f"engine's {generation.request_id}"

    def abort(self, id: str) -> None:
        self.aborted.append(id)


def asked(name: str) -> Generation:
    return Generation(name, "att", "m", (1,), Sampling(max_tokens=1))


def made() -> Session:
    return Session(cast(WorkerService, Service()), "g", 100)


async def test_a_name_is_taken_until_its_last_delta_was_read() -> None:
    session = made()
    await session.start(asked("a"))
    session.push(1, Delta("a", (5,), finish=FinishReason.STOP))
    with pytest.raises(InvalidRequest, match="runs already"):
        await session.start(asked("a"))
    frame = await anext(session.frames())
    assert [d.finish for d in frame.deltas] == [FinishReason.STOP]
    await session.start(asked("a"))
    session.push(2, Delta("a", (6,)))
    frame = await anext(session.frames())
    assert [(d.token_ids, d.finish) for d in frame.deltas] == [((6,), None)]


async def test_a_refused_name_is_taken_until_the_refusal_was_read() -> None:
    session = made()
    session.refuse("a", InvalidRequest("no"))
    with pytest.raises(InvalidRequest, match="runs already"):
        session.check_name("a")


async def test_silence_is_broken_by_signs_of_life() -> None:
    session = made()
    await session.start(asked("a"))
    frames = session.frames(0.01)
    # One at once, whatever there is to say; then one for each time without news.
    assert [(await anext(frames)).deltas for _ in range(3)] == [(), (), ()]
    session.push(3, Delta("a", (5,)))
    assert [d.token_ids for d in (await anext(frames)).deltas] == [(5,)]


async def test_the_first_frame_is_a_sign_of_life_though_there_is_news() -> None:
    session = made()
    await session.start(asked("a"))
    session.push(3, Delta("a", (5,)))
    frames = session.frames(60)
    assert (await anext(frames)).deltas == ()
    assert [d.token_ids for d in (await anext(frames)).deltas] == [(5,)]
