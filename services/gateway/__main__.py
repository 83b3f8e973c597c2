"""python -m services.gateway: parse, build, run."""

import sys

from services.common import lifecycle
from services.common.telemetry.logging import setup_logging
from services.gateway import app
from services.gateway.config import GatewaySettings


def main() -> int:
    """Runs a gateway until it is told to stop; returns the exit code."""
    settings = GatewaySettings.load_or_exit()
    setup_logging("gateway", level=settings.log_level, fmt=settings.log_format)
    return lifecycle.run(lambda life: app.main(settings, life))


if __name__ == "__main__":
    sys.exit(main())
