"""A background loop that breaks goes on; only its own task's end ends it."""

import asyncio

from services.common.loops import keep_going
from tests.support.polling import until


async def test_a_loop_that_breaks_begins_anew() -> None:
    begun = 0

    async def loop() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise ZeroDivisionError
        await asyncio.Event().wait()

    async def count() -> int:
        return begun

    task = asyncio.create_task(keep_going(loop, "test", pause_s=0.001))
    try:
        await until(count, lambda n: n == 3, within_s=5, what="a third beginning")
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled()
