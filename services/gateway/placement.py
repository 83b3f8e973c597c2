"""Where a request shall run: a router says, or, without one, it is the least loaded worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from services.common.cards import Role
from services.common.errors import ForebayError, Overloaded, Unavailable
from services.common.ids import AttemptId, new_id
from services.common.telemetry.logging import get_logger
from services.common.tenancy import tenants_of
from services.gateway.ports import Ask, Candidate, PlacedBy, Placement

log = get_logger(__name__)


class RouterClient(Protocol):
    """Any router."""

    async def place(self, ask: Ask) -> Placement:
        """A decision. Raises NoRouter (an Unavailable), or what the router refused with."""
        ...

    def release(self, placement: Placement, *, unreachable: bool = False) -> None:
        """Takes a placement back."""
        ...


class RoutedPlacer:
    """Asks a router first and falls back to the least loaded worker of the model, for all of a
    request: it never names one to prefill.

    It also falls back when the router sees no worker but we do (a router that has just started
    knows less than a gateway with living sessions), and when its decision fails: placement is a
    help, never a reason to refuse. Overload is the router's word and stands.
    """

    def __init__(
        self,
        router: RouterClient,
        candidates: Callable[[str], Sequence[Candidate]],
        on_fallback: Callable[[str], None],
        rng: random.Random,
    ) -> None:
        """`candidates(model)` are our own workers; `on_fallback(reason)` counts."""
        self._router = router
        self._candidates = candidates
        self._on_fallback = on_fallback
        self._rng = rng

    async def place(self, ask: Ask) -> Placement:
        """A placement. Raises Unavailable (NO_WORKER) or Overloaded."""
        try:
            return await self._router.place(ask)
        except Overloaded:
            raise
        except ForebayError as exc:
            placement = self._least_loaded(ask)
            if placement is None:
                raise Unavailable(
                    f"no worker can take a request for {ask.model!r} now", reason="NO_WORKER"
                ) from exc
            self._on_fallback(exc.reason)
            log.warning("placed without a router", reason=exc.reason, worker=placement.worker.id)
            return placement

    def release(self, placement: Placement, *, unreachable: bool = False) -> None:
        """Gives back a placement that was not used."""
        self._router.release(placement, unreachable=unreachable)

    def _least_loaded(self, ask: Ask) -> Placement | None:
        every = _allowed(self._candidates(ask.model), ask)
        fit = [c for c in every if c.worker.id not in ask.excluded]
        # A worker that failed this request but whose session lives is better than none.
        fit = fit or [c for c in every if c.connected]
        if not fit:
            return None
        # One that is there for prompts decodes as well, when nobody else is there.
        best = min(
            fit,
            key=lambda c: (
                c.role is Role.PREFILL,
                not c.connected,
                c.in_flight,
                self._rng.random(),
            ),
        )
        return Placement(
            attempt_id=AttemptId(new_id("att")),
            worker=best.worker,
            address=best.address,
            predicted_cached_tokens=0,
            placed_by=PlacedBy.FALLBACK,
        )


def _allowed(every: Sequence[Candidate], ask: Ask) -> Sequence[Candidate]:
    """Those that tenant and wishes leave; as at routers. A rank can't be chosen from here."""
    wishes = ask.wishes
    if wishes.rank is not None:
        return ()
    reserved = [(c, tenants_of(c.labels)) for c in every]
    own = [c for c, tenants in reserved if ask.tenant in tenants]
    return [
        c
        for c in own or [c for c, tenants in reserved if not tenants]
        if wishes.worker in ("", c.worker.id)
        and c.worker.id not in wishes.excluded
        and all(c.labels.get(name) == value for name, value in wishes.labels.items())
    ]
