"""The engine in processes of its own, without them: what its tasks do when something breaks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


async def test_an_engine_whose_events_can_t_be_read_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from services.worker.engines.port import EngineDead
    from services.worker.engines.vllm.isolated import IsolatedEngine
    from services.worker.engines.vllm.kvfeed import KvFeed

    async def broken(self: Any, context: Any) -> None:
        raise ValueError("not a batch of events")

    monkeypatch.setattr(KvFeed, "run", broken)

    async def never() -> None:
        await asyncio.Event().wait()

    source = SimpleNamespace(endpoint="ipc:///nowhere", replay_endpoint=None)
    llm = SimpleNamespace(
        get_kv_event_sources=lambda: {0: source},
        engine_core=SimpleNamespace(get_output_async=never),
    )
    profile: Any = SimpleNamespace(block_size=32, dp_size=1)
    engine = IsolatedEngine(llm, profile, SimpleNamespace())  # type: ignore[arg-type]
    heard: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()
    engine.listen(lambda step: None, heard.set_result)
    async with engine.running(), asyncio.timeout(5):
        assert "not a batch of events" in str(await heard)
