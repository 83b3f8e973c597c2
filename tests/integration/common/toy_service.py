"""A service for the lifecycle tests: `python -m tests.integration.common.toy_service MODE FILE`."""

import asyncio
import sys

from services.common import lifecycle
from services.common.cards import Instance, InstanceKind
from services.common.errors import Unavailable
from services.common.telemetry.logging import setup_logging


async def main(life: lifecycle.Lifecycle) -> None:
    """Serves, drains as MODE says, and tells on stdout how far it came."""
    mode, ready_file = sys.argv[1:]
    if mode == "fails":
        async with asyncio.TaskGroup() as group:
            group.create_task(_fail())
    instance = Instance("toy", InstanceKind.ROUTER, 5, "h:1", "tcp://h:2", "h:3")
    life.ready(instance, ready_file)
    print(life.phase, type(asyncio.get_running_loop()).__module__, flush=True)
    await life.wait_stop()
    print(life.phase, flush=True)
    if mode == "hangs":
        await asyncio.sleep(3600)
    print("drained", flush=True)


async def _fail() -> None:
    raise Unavailable("the toy port is taken", reason="PORT_TAKEN")


if __name__ == "__main__":
    setup_logging("toy")
    sys.exit(lifecycle.run(main))
