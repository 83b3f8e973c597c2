"""The part of Forebay that runs inside vLLM: KV blocks between its cache (G1) and the arena (G2).

plan.py decides, pure; scheduler_side.py and worker_side.py are the two halves that vLLM calls;
link.py talks to the node's kvbm daemon in a thread of its own; copier.py moves bytes.
Importing this package imports nothing of vLLM until `ForebayConnector` is asked for.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "ForebayConnector":
        # vLLM reads its environment at import, so not before the engine asks.
        from services.worker.connector.connector import ForebayConnector

        return ForebayConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
