"""The connector's figures on their way through vLLM's statistics to the worker's shell."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class ForebayStats(KVConnectorStats):  # type: ignore[misc]
    """`counts`, `transfers`: what happened since the last ones; `node`, `slots`, `held`, `fences`:
    how it is now.
    """

    data: dict[str, Any]

    def reset(self) -> None:
        """Forgets what happened."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds later figures."""
        counts = Counter(self.data.get("counts", {}))
        counts.update(other.data.get("counts", {}))
        data = {**self.data, **other.data, "counts": dict(counts)}
        if transfers := [*self.data.get("transfers", ()), *other.data.get("transfers", ())]:
            data["transfers"] = transfers
        return ForebayStats(data=data)

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's own log lines."""
        return dict(self.data.get("counts", {}))

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data


def stats(data: dict[str, Any]) -> ForebayStats:
    """Figures from their plain form."""
    return ForebayStats(data=data)
