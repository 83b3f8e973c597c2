"""`python -m services.kvbm`: one node's block daemon."""

import sys

from services.common import lifecycle
from services.common.telemetry.logging import setup_logging
from services.kvbm import app
from services.kvbm.config import KvbmSettings


def main() -> int:
    """Reads settings, runs, returns the exit status."""
    settings = KvbmSettings.load_or_exit()
    setup_logging("kvbm", level=settings.log_level, fmt=settings.log_format)
    return lifecycle.run(lambda life: app.main(settings, life))


if __name__ == "__main__":
    sys.exit(main())
