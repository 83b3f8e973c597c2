"""Runs a worker: `python -m services.worker --help`."""

import logging
import os
import sys
import threading

from services.common import lifecycle
from services.common.telemetry.logging import setup_logging
from services.worker import app, simulated
from services.worker.config import WorkerSettings
from services.worker.engines.vllm.environment import restart_for_threads


def main() -> int:
    """Reads the settings, serves until told to stop, returns the exit code."""
    settings = WorkerSettings.load_or_exit()
    if settings.engine == "vllm":
        restart_for_threads(settings)
    logging.captureWarnings(True)
    setup_logging(settings.service, level=settings.log_level, fmt=settings.log_format)
    serve = simulated.main if settings.engine == "sim" else app.main
    code = lifecycle.run(lambda life: serve(settings, life))
    if any(t.daemon and t.name == "engine" for t in threading.enumerate()):
        # It was stopped while it started, or it is stuck. Python would end under a thread that is
        # somewhere in torch, and that is an abort instead of an exit code.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
