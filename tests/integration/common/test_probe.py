"""The health probe of containers, run as a health check does, against real servers."""

import asyncio
import sys

from services.common.rpc.server import rpc_server


async def _probe(*args: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.common.rpc.probe",
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode().strip()


async def test_it_tells_a_server_that_serves_from_one_that_does_not() -> None:
    async with rpc_server("127.0.0.1", 0, []) as server:
        address = f"127.0.0.1:{server.port}"
        assert await _probe(address) == (1, "NOT_SERVING")
        await server.set_serving(True)
        assert await _probe(address) == (0, "SERVING")
    assert await _probe(address) == (1, "UNREACHABLE")


async def test_a_wrong_command_line_is_no_verdict() -> None:
    code, _ = await _probe()
    assert code == 2
