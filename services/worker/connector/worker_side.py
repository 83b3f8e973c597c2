"""The half of the connector beside the engine's memory: hands copies to a thread, tells ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.connector.copying import CopyThread
from services.worker.connector.model import Orders, Report


@dataclass(frozen=True, slots=True)
class Ends:
    """What ended before a step's end, in the engine's terms and in ours."""

    finished: frozenset[str] = frozenset()
    """Requests whose load is over, however."""
    invalid: frozenset[int] = frozenset()
    """Blocks that their loads did not fill."""
    report: Report = field(default_factory=Report)


NO_ENDS = Ends()


class WorkerSide:
    """One rank's copies. The engine's thread only."""

    def __init__(self, copies: CopyThread) -> None:
        self._copies = copies
        self._loading: dict[str, tuple[int, ...]] = {}

    def begin(self, orders: Orders) -> None:
        """Starts what a step brings, except its saves."""
        if orders.attach is not None:
            self._copies.attach(orders.attach)
        for load in orders.loads:
            self._loading[load.request] = load.blocks
            self._copies.load(load)

    def after_forward(self, orders: Orders) -> None:
        """Starts the step's saves: the blocks are complete when the forward pass is."""
        if not orders.saves:
            return
        if self._copies.failed_loads:
            # Nothing of a step beside a failed load is stored, whatever it was made from.
            self.drop(orders)
            return
        for save in orders.saves:
            self._copies.save(save)

    def drop(self, orders: Orders) -> None:
        """Ends a step's saves without copies."""
        for save in orders.saves:
            self._copies.drop(save)

    def take(self) -> Ends:
        """What has ended; each load exactly once, together with the blocks that it did not fill."""
        report = self._copies.take()
        if not report:
            return NO_ENDS
        invalid: set[int] = set()
        for request, result in report.loaded.items():
            invalid.update(self._loading.pop(request)[result.good :])
        return Ends(frozenset(report.loaded), frozenset(invalid), report)

    def stop(self) -> None:
        """Ends the copies."""
        self._copies.stop()
