"""`python -m services.router`: one router."""

import sys

from services.common import lifecycle
from services.common.telemetry.logging import setup_logging
from services.router import app
from services.router.config import RouterSettings


def main() -> int:
    """Reads settings, runs, returns the exit status."""
    settings = RouterSettings.load_or_exit()
    setup_logging("router", level=settings.log_level, fmt=settings.log_format)
    return lifecycle.run(lambda life: app.main(settings, life))


if __name__ == "__main__":
    sys.exit(main())
