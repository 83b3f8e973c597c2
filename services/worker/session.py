"""One caller's requests: their ids, and their news on the way to a single writer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from services.common.errors import ForebayError, InvalidRequest, Overloaded
from services.worker.core.backlog import Backlog, Frame
from services.worker.core.model import Delta, FinishReason, Generation
from services.worker.service import WorkerService, failure_of

FRAME_LIMIT = 400_000
"""Numbers in a frame: some 4 MB, well below the message limit even with one large share more."""


class Session:
    """Requests of one stream. Closing it, in whatever way, aborts all that still run."""

    def __init__(self, service: WorkerService, gateway_id: str, share_limit: int) -> None:
        self.gateway_id = gateway_id
        self._service = service
        self._backlog = Backlog(share_limit, FRAME_LIMIT)
        self._ids: dict[str, str] = {}
        self._starting: set[str] = set()
        self._cut: set[str] = set()
        self._news = asyncio.Event()
        self._last = False
        self._error: ForebayError | None = None
        self._closed = False
        service.session_opened()

    @property
    def closed(self) -> bool:
        """Whether nobody is left to read."""
        return self._closed

    async def start(self, generation: Generation) -> None:
        """Starts a request. Raises ForebayError; its news then never come."""
        name = generation.request_id
        self.check_name(name)
        self._starting.add(name)
        try:
            self._ids[name] = await self._service.start(generation, self)
        finally:
            self._starting.discard(name)

    def check_name(self, request_id: str) -> None:
        """Raises InvalidRequest for a name that is empty or in use."""
        if not request_id:
            raise InvalidRequest("request_id is empty", field="request_id")
        # A last delta that was not read yet counts: what comes after it would be taken for its own.
        if request_id in self._ids or request_id in self._starting or request_id in self._backlog:
            raise InvalidRequest(f"request_id {request_id!r} runs already", field="request_id")

    def refuse(self, request_id: str, exc: ForebayError) -> None:
        """Answers a request that could not be started."""
        delta = Delta(request_id, finish=FinishReason.ERROR, failure=failure_of(exc))
        self.push(self._service.step, delta)

    def abort(self, request_id: str) -> None:
        """Ends a request early; nothing happens when it ended before."""
        if (id := self._ids.get(request_id)) is not None:
            self._service.abort(id)

    def release(self, request_id: str) -> None:
        """Lets go of the KV of a prefill leg that has ended."""
        self._service.release_transfer(request_id)

    def push(self, step: int, delta: Delta) -> None:
        """Takes news of a request."""
        name = delta.request_id
        if delta.finish is not None:
            self._ids.pop(name, None)
        if self._closed:
            return
        if name in self._cut:
            if delta.finish is not None:
                self._cut.discard(name)
        elif not self._backlog.push(step, delta):
            self._cut.add(name)
            slow = Overloaded("the answer was not read fast enough and its backlog is full")
            self._backlog.cut(name, failure_of(slow))
            self.abort(name)
        self._news.set()

    def end(self, error: ForebayError | None = None) -> None:
        """Nothing new comes in: frames end when all requests have ended, at once with an error."""
        self._last = True
        self._error = error
        self._news.set()

    async def frames(self, sign_s: float | None = None) -> AsyncIterator[Frame]:
        """What is to be sent, merged while the reader is slow. Raises the error of `end`.

        `sign_s`: at first, and after so many seconds without news, comes an empty frame as a sign
        of life.
        """
        if sign_s is not None:
            # So that whoever listens knows from the start that signs are to be expected.
            yield Frame(self._service.step, ())
        while not self._closed:
            frame = self._backlog.take()
            if frame is not None:
                yield frame
                continue
            if self._error is not None:
                raise self._error
            if self._last and not self._ids and not self._starting:
                return
            self._news.clear()
            try:
                async with asyncio.timeout(sign_s):
                    await self._news.wait()
            except TimeoutError:
                yield Frame(self._service.step, ())

    def close(self) -> None:
        """Aborts what runs; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._service.session_closed()
        for id in list(self._ids.values()):
            self._service.abort(id)
        self._news.set()
