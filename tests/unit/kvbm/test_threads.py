"""Threads whose calls may hang: deadlines, fences, replacements, bounds. Needs no special disk."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from services.kvbm.movers.threads import Fence, Threads, joined
from tests.support.polling import until


class Gate:
    """A call that returns when it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.entered = 0

    def __call__(self) -> int:
        self.entered += 1
        self._open.wait(20)
        return 7

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads(2, spare=2)
    yield threads
    threads.close()


def no_error() -> str:
    return "done"


async def test_results_come_in_order(threads: Threads) -> None:
    def work(number: int) -> Callable[[], int]:
        return lambda: number

    ran = await threads.run([work(number) for number in range(50)], 10)
    assert ran.results == list(range(50))
    assert ran.fence is None


async def test_an_exception_is_its_own_calls_result(threads: Threads) -> None:
    def fail() -> str:
        raise ValueError("no")

    ran = await threads.run([no_error, fail, no_error], 10)
    assert ran.results[0] == ran.results[2] == "done"
    assert isinstance(ran.results[1], ValueError)
    with pytest.raises(ValueError, match="no"):
        await threads.call(fail, 10)


async def test_the_deadline_ends_the_wait_and_the_fence_the_ownership(
    threads: Threads, gate: Gate
) -> None:
    """C14."""
    start = time.monotonic()
    ran = await threads.run([gate, gate, gate], 0.2)
    assert time.monotonic() - start < 2
    assert all(isinstance(result, TimeoutError) for result in ran.results)
    assert ran.fence is not None
    assert threads.stuck == 2
    fence = asyncio.ensure_future(_pass(ran.fence))
    await asyncio.wait([fence], timeout=0.05)
    assert not fence.done()
    gate.open()
    await asyncio.wait_for(fence, 5)
    # The third had not begun, and never does.
    assert gate.entered == 2
    await until(_async(lambda: threads.stuck), lambda stuck: stuck == 0, within_s=5)


async def test_others_take_the_place_of_those_that_hang_up_to_a_bound(
    threads: Threads, gate: Gate
) -> None:
    """C14: at the bound calls are refused at once; when all are back, it is as before."""
    fences = []
    for _ in range(2):
        ran = await threads.run([gate, gate], 0.1)
        fences.append(ran.fence)
        if threads.stuck < 4:
            assert await threads.call(no_error, 5) == "done"
    assert threads.stuck == 4
    start = time.monotonic()
    with pytest.raises(OSError, match="all 4 threads hang"):
        await threads.call(no_error, 5)
    assert time.monotonic() - start < 1
    gate.open()
    for fence in fences:
        assert fence is not None
        await asyncio.wait_for(_pass(fence), 5)
    assert (await threads.run([no_error] * 20, 5)).results == ["done"] * 20
    # Those that were too many have ended.
    await until(
        _async(lambda: threads._alive), lambda alive: alive <= 2, within_s=5, what="only two left"
    )


async def test_a_cancelled_caller_begins_nothing_more(threads: Threads, gate: Gate) -> None:
    task = asyncio.create_task(threads.run([gate] * 5, 10))
    await until(_async(lambda: gate.entered), lambda entered: entered == 2, within_s=5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()
    await until(_async(lambda: threads.stuck), lambda stuck: stuck == 0, within_s=5)
    assert await threads.call(no_error, 5) == "done"
    assert gate.entered == 2


async def test_the_backlog_is_bounded(gate: Gate) -> None:
    threads = Threads(1, backlog=4)
    task = asyncio.create_task(threads.run([gate], 10))
    await until(_async(lambda: gate.entered), within_s=5)
    waiting = asyncio.create_task(threads.run([no_error] * 4, 10))
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="wait already"):
        await threads.call(no_error, 5)
    gate.open()
    assert (await task).results == [7]
    assert (await waiting).results == ["done"] * 4
    threads.close()
    with pytest.raises(OSError, match="closed"):
        await threads.call(no_error, 5)


async def test_joined_fences_open_with_the_last() -> None:
    first, second = Fence(), Fence()
    assert joined(None, None) is None
    assert joined(None, first) is first
    both = joined(first, second)
    assert both is not None
    task = asyncio.ensure_future(_pass(both))
    first.open()
    await asyncio.sleep(0)
    assert not task.done()
    second.open()
    await asyncio.wait_for(task, 1)
    await both


async def _pass(fence: Awaitable[None]) -> None:
    await fence


def _async(read: Callable[[], int]) -> Callable[[], Awaitable[int]]:
    async def probe() -> int:
        return read()

    return probe
