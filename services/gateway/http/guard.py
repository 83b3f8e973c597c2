"""Ends a request's handling from outside, for a reason: client gone, deadline passed, shutdown."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class Guard:
    """While entered, `end` stops the task that entered it and makes the block raise the reason.

    It cancels the task, as asyncio.timeout does, so that whatever it waits for is cleaned up on the
    way.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self.reason: Exception | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        return self

    def end(self, reason: Exception) -> None:
        """Stops the block; the first reason counts. Without effect once the block is left."""
        if self._task is None or self.reason is not None:
            return
        self.reason = reason
        self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if self.reason is None or task is None:
            return
        mine = task.uncancel() <= self._cancelling
        if mine and (kind is None or kind is asyncio.CancelledError):
            raise self.reason from None
