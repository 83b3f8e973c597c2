"""ForebayConnectors: transfers between engines first, then the tiers of the node, as one connector.

vLLM's MultiConnector hands the first child's greeting to all of them and knows children's figures
by a registry that ours are not in. A request is loaded by one child alone: by transfers, if it
names one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from services.worker.connector.stats import ForebayStats


@dataclass
class Greetings(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What each child's worker side tells its scheduler side."""

    of_children: list[KVConnectorHandshakeMetadata | None]


class ForebayConnectors(MultiConnector):  # type: ignore[misc]
    """Several connectors as one."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """All children's greetings."""
        return Greetings([child.get_handshake_metadata() for child in self._connectors])

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """To each child its own."""
        for number, child in enumerate(self._connectors):
            mine = {
                rank: greeting
                for rank, greetings in metadata.items()
                if (greeting := greetings.of_children[number]) is not None
            }
            if mine:
                child.set_xfer_handshake_metadata_pp_aware(mine)

    def get_kv_connector_stats(self) -> ForebayStats | None:
        """The children's figures, whose names differ, in one."""
        data: dict[str, Any] = {}
        for child in self._connectors:
            stats = child.get_kv_connector_stats()
            if stats is not None:
                data.update(stats.data)
        return ForebayStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ForebayStats | None:
        """Figures from their plain form."""
        return ForebayStats(data=data) if data else None

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **more: Any) -> None:
        """None of vLLM's: the worker's shell has its own."""

    def child(self, kind: type) -> Any:
        """The child of that class; None without one."""
        return next((c for c in self._connectors if isinstance(c, kind)), None)
