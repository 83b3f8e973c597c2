"""`forebay up --engine sim`: every service is real, only the engines compute nothing."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from services.cli.adapters.http import open_chat
from services.cli.status import look
from services.cli.up.command import closing_words
from services.cli.up.options import UpOptions
from services.cli.up.run import Cluster, StopRequests, run_cluster
from tests.integration.cli.test_up import Quiet
from tests.models import default_cache_dir, tiny_model

WORKERS = 24


@pytest.mark.timeout(120)
async def test_many_workers_serve_from_one_process(tmp_path: Path) -> None:
    options = UpOptions(
        state_dir=str(tmp_path / "state"),
        model=str(tiny_model(default_cache_dir())),
        served_model_name="tiny",
        engine="sim",
        workers=WORKERS,
        auto_ports=True,
        start_timeout_s=60,
        drain_timeout_s=2,
    )
    seen: list[str] = []

    async def serve(cluster: Cluster) -> None:
        now = cluster.state
        assert [p.kind for p in now.processes] == ["etcd", "router", "worker", "gateway"]
        async with open_chat(now.gateway_url, api_key="") as chat:
            for _ in range(3):
                answer = await chat.ask("tiny", "hello " * 60, max_tokens=5, temperature=0)
                seen.append(answer.text)
            assert 1 <= answer.completion_tokens <= 5  # an answer may end by itself
            assert answer.cached_tokens == answer.predicted_cached_tokens > 0
        found = await look(Path(options.state_dir))
        assert found.ok and found.workers is not None
        assert {w.holder.id for w in found.workers} == {f"worker-0.{i}" for i in range(WORKERS)}
        async with httpx.AsyncClient() as client:
            (model,) = (await client.get(f"{now.gateway_url}/v1/models")).json()["data"]
        assert model["engine"].startswith("simulator")
        assert "SIMULATED" in closing_words(now, options, detached=False).plain

    await run_cluster(options, Quiet(), StopRequests(), serve)
    assert len(set(seen)) == 1
