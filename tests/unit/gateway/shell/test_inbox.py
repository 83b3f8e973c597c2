"""The inbox merges what a slow reader has not seen; a patient one is woken when it matters."""

import asyncio

from services.common.errors import Unavailable
from services.gateway.ports import Ended, Inbox


def add(inbox: Inbox, request_id: str, *tokens: int, ended: Ended | None = None) -> None:
    news = inbox.of(request_id)
    news.token_ids += tokens
    news.ended = ended
    inbox.wake(request_id, news)


async def woken(inbox: Inbox) -> bool:
    task = asyncio.create_task(inbox.take())
    for _ in range(3):
        await asyncio.sleep(0)
    if task.done():
        return True
    task.cancel()
    return False


async def test_merges() -> None:
    inbox = Inbox()
    for token in range(1000):
        add(inbox, "a", token)
    add(inbox, "b", 7, ended=Ended.STOP)
    news = await inbox.take()
    assert news["a"].token_ids == list(range(1000)) and news["a"].ended is None
    assert news["b"].token_ids == [7] and news["b"].ended is Ended.STOP
    assert not await woken(inbox)


async def test_patience() -> None:
    inbox = Inbox(patient=True)
    add(inbox, "a", 1)
    assert await woken(inbox)
    add(inbox, "a", 2)
    assert not await woken(inbox)
    add(inbox, "b", 9)
    assert await woken(inbox)
    add(inbox, "a", 3, ended=Ended.LENGTH)
    assert await woken(inbox)


async def test_patience_ends_with_an_error() -> None:
    inbox = Inbox(patient=True)
    add(inbox, "a", 1)
    await inbox.take()
    add(inbox, "a", 2)
    news = inbox.of("a")
    news.error = Unavailable("gone")
    inbox.wake("a", news)
    assert (await inbox.take())["a"].token_ids == [2]
