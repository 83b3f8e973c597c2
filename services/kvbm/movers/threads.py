"""Threads for calls that may never return, such as I/O on a file system that hangs.

A thread inside the kernel can't be stopped. Its caller gets an answer at the deadline anyway, with
a fence that opens when the thread is back, and the pool gets another thread in its place, up to a
bound. Not an executor: nothing waits for these threads at the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Fence:
    """Opens once; any number of tasks may await it, and be cancelled meanwhile."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()

    def open(self) -> None:
        """Lets everybody through. Loop's thread only."""
        self._opened.set()

    @property
    def is_open(self) -> bool:
        """Whether awaiting it returns at once."""
        return self._opened.is_set()

    def __await__(self) -> Generator[object, None, None]:
        yield from self._opened.wait().__await__()


class Fences:
    """Several as one."""

    def __init__(self, fences: Iterable[Awaitable[None]]) -> None:
        self._fences = tuple(fences)

    def __await__(self) -> Generator[object, None, None]:
        for fence in self._fences:
            yield from fence.__await__()


def joined(*fences: Awaitable[None] | None) -> Awaitable[None] | None:
    """One fence that opens with the last of them; None when there is none."""
    some = [fence for fence in fences if fence is not None]
    return Fences(some) if len(some) > 1 else some[0] if some else None


@dataclass(frozen=True, slots=True)
class Ran(Generic[T]):
    """How a batch of calls ended: for each, in order, its value or the exception.

    TimeoutError: the deadline passed. `fence` then says when the last call that had begun is over;
    None: all are over, or never began and never will.
    """

    results: Sequence[T | Exception]
    fence: Fence | None = None


class _Batch:
    """Calls of one caller. The pool's lock guards it."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.calls = calls
        self.results: dict[int, object] = {}
        self.running: set[int] = set()
        self.fence: Fence | None = None
        self.expired = False
        self.done = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def tell(self, what: Callable[[], None]) -> None:
        """Calls on the loop, from a thread."""
        # The loop may be closed by now: then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(what)


class Threads:
    """A bounded pool. Loop's thread only, from the outside."""

    def __init__(
        self, count: int, *, spare: int = 8, backlog: int = 8192, name: str = "kvbm-io"
    ) -> None:
        self._count = count
        self._limit = count + spare
        self._backlog = backlog
        self._name = name
        self._lock = threading.Condition()
        self._jobs: deque[tuple[_Batch, int]] = deque()
        self._alive = 0
        self._idle = 0
        self._stuck = 0
        self._closed = False

    @property
    def stuck(self) -> int:
        """Threads whose callers have given up on them."""
        return self._stuck

    async def run(self, calls: Sequence[Callable[[], T]], timeout_s: float) -> Ran[T]:
        """Runs them all, in any order; returns after `timeout_s` at the latest.

        Calls that have not begun by then never will; nor when the caller is cancelled.
        """
        if not calls:
            return Ran(())
        batch = _Batch(calls)
        if refusal := self._enqueue(batch):
            return Ran([OSError(refusal) for _ in calls])
        late = False
        try:
            async with asyncio.timeout(timeout_s):
                await batch.done.wait()
        except TimeoutError:
            late = True
        finally:
            self._expire(batch)
        if late:
            for index in range(len(calls)):
                state = "is still running" if index in batch.running else "had not begun"
                batch.results.setdefault(index, TimeoutError(f"{state} after {timeout_s:.1f} s"))
        results = [cast("T | Exception", batch.results[index]) for index in range(len(calls))]
        return Ran(results, batch.fence)

    async def call(self, call: Callable[[], T], timeout_s: float) -> T:
        """Runs one; raises what it raises, or TimeoutError (an OSError) at the deadline."""
        (result,) = (await self.run([call], timeout_s)).results
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Lets idle threads end. Those in a call end after it; calls that wait never begin."""
        with self._lock:
            self._closed = True
            self._jobs.clear()
            self._lock.notify_all()

    def _enqueue(self, batch: _Batch) -> str:
        """Empty, or why the batch is refused."""
        with self._lock:
            if self._closed:
                return "closed"
            if self._stuck >= self._limit:
                return f"all {self._limit} threads hang in calls that don't return"
            if len(self._jobs) + len(batch.calls) > self._backlog:
                return f"more than {self._backlog} calls wait already"
            self._jobs.extend((batch, index) for index in range(len(batch.calls)))
            self._staff()
            self._lock.notify(len(batch.calls))
        return ""

    def _staff(self) -> None:
        """Starts threads as long as calls wait for one and the bounds allow it."""
        missing = len(self._jobs) - self._idle
        room = min(self._count + self._stuck, self._limit) - self._alive
        for _ in range(min(missing, room)):
            self._alive += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _expire(self, batch: _Batch) -> None:
        """After this the batch's results stand; late threads only open its fence."""
        with self._lock:
            batch.expired = True
            if not batch.running:
                if len(batch.results) < len(batch.calls):
                    self._jobs = deque(job for job in self._jobs if job[0] is not batch)
                return
            batch.fence = Fence()
            self._jobs = deque(job for job in self._jobs if job[0] is not batch)
            self._stuck += len(batch.running)
            self._staff()

    def _work(self) -> None:
        while job := self._next():
            batch, index = job
            try:
                result = batch.calls[index]()
            except Exception as exc:  # The caller gets it as the call's result.
                result = exc
            with self._lock:
                self._over(batch, index, result)

    def _next(self) -> tuple[_Batch, int] | None:
        """The next call, begun; None: this thread is one too many, or all shall end."""
        with self._lock:
            while not self._closed and self._alive <= self._count + self._stuck:
                if self._jobs:
                    batch, index = self._jobs.popleft()
                    batch.running.add(index)
                    return batch, index
                self._idle += 1
                self._lock.wait()
                self._idle -= 1
            self._alive -= 1
            self._lock.notify()
            return None

    def _over(self, batch: _Batch, index: int, result: object) -> None:
        batch.running.discard(index)
        if batch.expired:
            self._stuck -= 1
            if not batch.running and batch.fence:
                batch.tell(batch.fence.open)
            return
        batch.results[index] = result
        if len(batch.results) == len(batch.calls):
            batch.tell(batch.done.set)
