"""vLLM behind the engine port: in this process (CPU), or in processes of its own (AsyncLLM)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.worker.config import WorkerSettings
from services.worker.engines.port import Engine
from services.worker.engines.vllm.environment import prepare


@asynccontextmanager
async def open_vllm(settings: WorkerSettings) -> AsyncIterator[Engine]:
    """Starts the engine that the settings ask for; it is stopped at the end.

    Takes many seconds. Raises EngineStartError or SettingsError.
    """
    mode = await asyncio.to_thread(prepare, settings)
    # vLLM reads its environment at import: these modules import it, and so come after `prepare`.
    if mode == "inprocess":
        from services.worker.engines.vllm.inprocess import open_inprocess

        async with open_inprocess(settings) as engine:
            yield engine
    else:
        from services.worker.engines.vllm.isolated import open_isolated

        async with open_isolated(settings) as isolated:
            yield isolated
