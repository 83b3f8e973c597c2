"""Work of one undertaking, of which a few pieces go on at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Underway:
    """At most `most` pieces at a time. The first that fails is the failure of all.

    Whatever waits here raises what a piece has raised, as soon as it is known.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Pieces that go on."""
        return len(self._tasks)

    async def add(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins a piece, and waits until there is room for another."""
        self._tasks.add(asyncio.create_task(work, name=self._name))
        # One that is cancelled before it has begun would not even clean up.
        await asyncio.sleep(0)
        while len(self._tasks) >= self._most:
            await self.one()

    async def one(self) -> None:
        """Waits until one of those that go on is over."""
        self._reap((await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED))[0])

    async def drain(self) -> None:
        """Waits for all."""
        while self._tasks:
            await self.one()

    async def beside(self, other: asyncio.Task[T]) -> T:
        """Waits for something else, which goes on if that ends early; its result."""
        while not other.done():
            some = {other, *self._tasks}
            await asyncio.wait(some, return_when=asyncio.FIRST_COMPLETED)
            self._reap({task for task in self._tasks if task.done()})
        return other.result()

    async def stop(self) -> None:
        """Cancels what still goes on, and waits until nothing does. Does not raise their errors."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def _reap(self, over: set[asyncio.Task[None]]) -> None:
        self._tasks -= over
        errors = [task.exception() for task in over]
        for error in errors:
            if error is not None:
                raise error
