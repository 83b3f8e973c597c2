"""KV from engine to engine, for prefill and decode apart: vLLM's NixlConnector made safe (ADR 17).

agents.py ends reads that don't end; sums.py checks what arrived; worker_side.py and
scheduler_side.py are vLLM's two halves with both; connectors.py runs them beside ForebayConnector.
Importing this package imports nothing of vLLM until a connector is asked for.
"""

from typing import Any

WAY = "nixl"
"""How KV is taken here, in discovery records and handles."""


def __getattr__(name: str) -> Any:
    # vLLM reads its environment at import, so not before the engine asks.
    if name == "ForebayTransfer":
        from services.worker.connector.transfer.connector import ForebayTransfer

        return ForebayTransfer
    if name == "ForebayConnectors":
        from services.worker.connector.transfer.connectors import ForebayConnectors

        return ForebayConnectors
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
