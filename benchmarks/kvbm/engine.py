"""A worker process as benchmarks want it: `python -m benchmarks.kvbm.engine FLAGS`.

Flags are the worker's own, and before them, if wanted: `--steps FILE` times the connector's calls
on the engine's thread and writes them at the end; `--connector JSON` loads one of vLLM's own
connectors (fields of its KVTransferConfig) in the place of ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from services.common import lifecycle
from services.common.telemetry.logging import setup_logging
from services.worker.app import main as serve
from services.worker.config import WorkerSettings
from services.worker.engines.vllm.environment import prepare

CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "has_pending_push_work",
    "get_kv_connector_stats",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)
"""What vLLM calls in a step, of both sides: one thread runs them here. The two that it calls for
each layer are empty, and a timer would cost more than they do."""


class Steps:
    """What the connector's calls took, by step. The engine's thread only."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._depth = 0

    def watch(self, connector: type) -> None:
        """Puts a timer around each call."""
        for name in CALLS:
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def _timed(self, name: str, call: Any) -> Any:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # one of them calls another
                return call(*args, **kwargs)
            if name == "build_connector_meta":
                self._close(args[1])
            self._depth += 1
            began = time.perf_counter_ns()
            try:
                result = call(*args, **kwargs)
            finally:
                took_us = (time.perf_counter_ns() - began) / 1000
                self._depth -= 1
                self._now["us"] = self._now.get("us", 0.0) + took_us
                self._now[name] = self._now.get(name, 0.0) + took_us
            if name == "build_connector_meta":
                orders = result.orders
                copies = bool(orders.loads or orders.saves)
                self._now["copies"] = self._now.get("copies", 0.0) + copies
            elif name == "build_connector_worker_meta" and result is not None:
                self._now["copies"] = self._now.get("copies", 0.0) + 1
            return result

        return timed

    def _close(self, output: Any) -> None:
        """A step begins: the one before it is over."""
        if self._now:
            self.rows.append(self._now)
        scheduled = output.num_scheduled_tokens
        self._now = {
            "requests": len(scheduled),
            "tokens": sum(scheduled.values()),
            "copies": 0.0,
        }


def main() -> int:
    """Serves until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--steps")
    parser.add_argument("--connector")
    mine, rest = parser.parse_known_args()
    settings = WorkerSettings.load_or_exit(rest)
    setup_logging(settings.service, level=settings.log_level, fmt=settings.log_format)
    # vLLM reads its environment at import.
    prepare(settings)
    steps = Steps()
    if mine.steps:
        from services.worker.connector.connector import ForebayConnector

        steps.watch(ForebayConnector)
    if mine.connector:
        from vllm.config import KVTransferConfig

        config = KVTransferConfig(**json.loads(mine.connector))
        arguments = settings.engine_args | {"kv_transfer_config": config}
        settings = settings.model_copy(update={"engine_args": arguments})
    code = lifecycle.run(lambda life: serve(settings, life))
    if mine.steps:
        Path(mine.steps).write_text(json.dumps(steps.rows))
    return code


if __name__ == "__main__":
    sys.exit(main())
