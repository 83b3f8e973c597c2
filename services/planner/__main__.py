"""`python -m services.planner`: one planner."""

import sys

from services.common import lifecycle
from services.common.telemetry.logging import setup_logging
from services.planner import app
from services.planner.config import PlannerSettings


def main() -> int:
    """Reads settings, runs, returns the exit status."""
    settings = PlannerSettings.load_or_exit()
    setup_logging("planner", level=settings.log_level, fmt=settings.log_format)
    return lifecycle.run(lambda life: app.main(settings, life))


if __name__ == "__main__":
    sys.exit(main())
