"""The shell of admission: who is to be told when a request that waits is answered, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import ForebayError, Internal
from services.common.telemetry.logging import get_logger
from services.router.adapters.metrics import RouterMetrics
from services.router.core.admission import Admission, Answered
from services.router.core.answers import Placement, Query, Refusal, RefusalKind
from services.router.errors import error_of
from services.router.ports import Clock

log = get_logger(__name__)

_NEWS_S = 0.01
"""Workers' news of so long are taken together before those who wait are decided anew."""
_DECISIONS_AT_ONCE = 16

Tell = Callable[[Placement | ForebayError, float], None]
"""Takes the answer, and for how many seconds it was waited for. Doesn't wait."""


@dataclass(frozen=True, slots=True)
class _Waiter:
    query: Query
    tell: Tell


class WaitingRoom:
    """Tells each waiter once, unless it leaves before."""

    def __init__(self, admission: Admission, clock: Clock, metrics: RouterMetrics) -> None:
        self._admission = admission
        self._clock = clock
        self._metrics = metrics
        self._waiters: dict[int, _Waiter] = {}
        self._pumping: asyncio.Handle | None = None

    def enter(self, number: int, query: Query, tell: Tell) -> None:
        """`tell` will be called with the answer to what admission lets wait as `number`."""
        self._waiters[number] = _Waiter(query, tell)
        self.news()

    def leave(self, number: int) -> bool:
        """Nobody waits for it any more. False if it has been told."""
        if self._waiters.pop(number, None) is None:
            return False
        self._admission.cancel(number)
        self._metrics.cancelled()
        return True

    def send_away(self, error: ForebayError) -> None:
        """Tells all that wait that they can't stay."""
        for number, waiter in list(self._waiters.items()):
            if self.leave(number):
                waiter.tell(error, 0.0)

    def news(self) -> None:
        """Workers have told something: soon those who wait are decided anew."""
        if self._waiters and self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_later(_NEWS_S, self._pump)

    def tick(self) -> None:
        """Time has passed; call it a few times a second, for waits end by time as well."""
        if self._waiters and self._pumping is None:
            self._pump()
        self._metrics.waiting(len(self._admission), self._admission.waiting_tokens)

    def _pump(self) -> None:
        """Decides those whose turn has come; goes on soon if there are more."""
        self._pumping = None
        try:
            for one in self._admission.pump(self._clock(), _DECISIONS_AT_ONCE):
                self._settle(one)
        except Exception:
            # One request's trouble must not hold up all: it is logged and answered.
            log.exception("decision failed")
            number = self._admission.deciding
            self._admission.cancel(number)
            failed = Internal("the decision failed; the router's log says why")
            self._tell(number, failed, 0.0)
            self.news()
            return
        if self._admission.more and self._waiters and self._pumping is None:
            # Others have their turn in between.
            self._pumping = asyncio.get_running_loop().call_soon(self._pump)

    def _settle(self, one: Answered) -> None:
        self._metrics.waited(one.result, one.waited_s)
        answer = one.answer
        if not isinstance(answer, Refusal):
            self._tell(one.number, answer, one.waited_s)
            return
        waiter = self._waiters.get(one.number)
        if answer.kind is RefusalKind.OVERLOADED and waiter is not None:
            self._metrics.overloaded(waiter.query.tenant, one.heavy)
        self._tell(one.number, error_of(answer), one.waited_s)

    def _tell(self, number: int, answer: Placement | ForebayError, waited_s: float) -> None:
        waiter = self._waiters.pop(number, None)
        if waiter is not None:
            waiter.tell(answer, waited_s)
