"""Daemons in this process, with real arenas, disk, gRPC and ZMQ, in folders of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forebay.kvbm.v1 import kvbm_pb2_grpc as pb_grpc

from services.common.rpc.channel import open_channel
from services.kvbm.app import Daemon, daemon
from services.kvbm.config import KvbmSettings

MIB = 2**20


@dataclass
class Rig:
    daemon: Daemon
    address: str
    stub: Any
    folder: Path

    @property
    def counts(self) -> Any:
        return self.daemon.node.metrics.counts


def settings(folder: Path, **more: Any) -> KvbmSettings:
    values: dict[str, Any] = {
        "id": "n0",
        "port": 0,
        "events_port": 0,
        "metrics_port": 0,
        "cpu_cache_gb": 8 * MIB / 2**30,
        "cpu_cache_dir": str(folder / "arenas"),
        "disk_free_gb": 0.0,
        "scrub_mb_s": 0.0,
        # What a request waits for in production is too short beside engines that start.
        "promote_ms": 20_000,
        **more,
    }
    if values.get("disk_cache_gb") and "disk_cache_dir" not in values:
        values["disk_cache_dir"] = str(folder / "disk")
    return KvbmSettings(**values)


@pytest.fixture
def rig(tmp_path: Path) -> Callable[..., Any]:
    """`async with rig(disk_cache_gb=...) as r`: a daemon with all its own work going on."""

    @contextlib.asynccontextmanager
    async def run(**more: Any) -> AsyncIterator[Rig]:
        folder = Path(more.pop("folder", tmp_path))
        async with daemon(settings(folder, **more)) as running:
            tasks = asyncio.TaskGroup()
            async with tasks, open_channel(running.instance.address) as channel:
                loops = running.caretaker.start(tasks)
                try:
                    stub = pb_grpc.KvbmServiceStub(channel)  # type: ignore[no-untyped-call]
                    yield Rig(running, running.instance.address, stub, folder)
                finally:
                    for loop in loops:
                        loop.cancel()

    return run
