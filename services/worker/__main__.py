"""Runs a worker: `python -m services.worker --help`."""

import logging
import sys

from services.common import lifecycle
from services.common.telemetry.logging import setup_logging
from services.worker.app import main as serve
from services.worker.config import WorkerSettings


def main() -> int:
    """Reads the settings, serves until told to stop, returns the exit code."""
    settings = WorkerSettings.load_or_exit()
    logging.captureWarnings(True)
    setup_logging(settings.service, level=settings.log_level, fmt=settings.log_format)
    return lifecycle.run(lambda life: serve(settings, life))


if __name__ == "__main__":
    sys.exit(main())
