"""The guard ends what it guards, once, and nothing else."""

import asyncio

import pytest

from services.gateway.http.guard import ClientGone, Guard


async def test_ends_what_waits() -> None:
    guard = Guard()
    cleaned = []

    async def body() -> None:
        with guard:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append(True)

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    guard.end(ClientGone())
    with pytest.raises(ClientGone):
        await task
    assert cleaned == [True] and not task.cancelled()


async def test_the_first_reason_counts() -> None:
    guard = Guard()

    async def body() -> None:
        with guard:
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    guard.end(TimeoutError())
    guard.end(ClientGone())
    with pytest.raises(TimeoutError):
        await task


async def test_no_effect_after_the_block() -> None:
    guard = Guard()
    with guard:
        pass
    guard.end(ClientGone())
    await asyncio.sleep(0)
    assert guard.reason is None


async def test_another_cancellation_stays_one() -> None:
    """Who cancels the task from elsewhere is not answered by our reason."""

    async def body() -> None:
        with Guard():
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_blocks_own_error_wins() -> None:
    guard = Guard()

    async def body() -> None:
        with guard:
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("on the way out")

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    guard.end(ClientGone())
    with pytest.raises(ValueError, match="on the way out"):
        await task
