"""Background loops of a process: one that breaks is told of and begun anew."""

import asyncio
from collections.abc import Awaitable, Callable

from services.common.telemetry.logging import get_logger

log = get_logger(__name__)


async def keep_going(loop: Callable[[], Awaitable[None]], name: str, pause_s: float = 1.0) -> None:
    """Runs an endless loop until cancelled.

    The boundary of a task: a fault in a process's own work costs that work `pause_s` seconds, not
    the process and all that it serves.
    """
    while True:
        try:
            await loop()
        except Exception:
            log.exception("a background loop broke; it begins anew", loop=name)
        await asyncio.sleep(pause_s)
