"""Work of one undertaking, of which a few pieces go on at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Underway:
    """At most `most` pieces at a time. The first that fails is the failure of all."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins a piece, and waits until there is room for another. Raises what one has raised."""
        self._tasks.add(asyncio.create_task(work, name=self._name))
        # One that is cancelled before it has begun would not even clean up.
        await asyncio.sleep(0)
        await self._until_fewer_than(self._most)

    async def drain(self) -> None:
        """Waits for all. Raises what one has raised."""
        await self._until_fewer_than(1)

    async def stop(self) -> None:
        """Cancels what still goes on, and waits until nothing does. Does not raise their errors."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _until_fewer_than(self, count: int) -> None:
        while len(self._tasks) >= count:
            over, self._tasks = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            errors = [task.exception() for task in over]
            for error in errors:
                if error is not None:
                    raise error
