"""grpcurl lists and calls every service by reflection, as people do."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import RouterClient
from tests.support.cluster import MODEL, Cluster

PROMPT = list(range(300, 400))
SAMPLING = {"max_tokens": 3, "temperature": 0}


def grpcurl(*args: str, data: str | None = None) -> str:
    program = Path(sys.executable).parent / "grpcurl"
    found = str(program) if program.exists() else shutil.which("grpcurl")
    assert found, "grpcurl is part of the dev extra"
    options = ["-plaintext", "-max-time", "20"] + (["-d", "@"] if data is not None else [])
    done = subprocess.run(
        [found, *options, *args], input=data, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def messages(text: str) -> list[dict[str, Any]]:
    """All JSON messages of a (streamed) answer."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        message, at = decoder.raw_decode(text, at)
        found.append(message)
    return found


def call(address: str, method: str, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    return messages(grpcurl(address, method, data="\n".join(json.dumps(r) for r in requests)))


async def test_reflection_lists_everything(cluster: Cluster) -> None:
    for name, service, methods in (
        (
            "router-0",
            "forebay.router.v1.RouterService",
            {"RouteStream", "Route", "Explain", "ListWorkers", "GetIndexStats"},
        ),
        (
            "worker-0",
            "forebay.worker.v1.WorkerService",
            {
                "Session",
                "Generate",
                "Snapshot",
                "GetModelCard",
                "GetModelFile",
                "ResetCache",
                "Drain",
                "SetRole",
            },
        ),
    ):
        address = cluster.ready(name).address
        listed = grpcurl(address, "list").split()
        assert {service, "grpc.health.v1.Health"} <= set(listed)
        assert {m.rsplit(".", 1)[1] for m in grpcurl(address, "list", service).split()} == methods
        assert f"service {service.rsplit('.', 1)[1]}" in grpcurl(address, "describe", service)
        (health,) = call(address, "grpc.health.v1.Health/Check", {})
        assert health == {"status": "SERVING"}


async def test_router_calls(cluster: Cluster) -> None:
    address = cluster.ready("router-0").address
    service = "forebay.router.v1.RouterService"
    route = {"model": MODEL, "token_ids": PROMPT, "request_id": "by-hand"}
    (listed,) = call(address, f"{service}/ListWorkers", {})
    assert [w["worker"]["id"] for w in listed["workers"]] == ["worker-0", "worker-1"]
    assert {w["state"] for w in listed["workers"]} == {"WORKER_STATE_READY"}
    assert {w["model"] for w in listed["workers"]} == {MODEL}
    (explained,) = call(address, f"{service}/Explain", {"request": route})
    assert explained["prompt_blocks"] == 3
    assert len(explained["candidates"]) == 2
    assert [c.get("chosen", False) for c in explained["candidates"]] == [True, False]
    assert explained["candidates"][1]["reason"]
    (placed,) = call(address, f"{service}/Route", route)
    assert placed["attempt_id"] and placed["worker"]["id"] in ("worker-0", "worker-1")
    (streamed,) = call(
        address,
        f"{service}/RouteStream",
        {"correlation_id": 7, "route": route},
        {"correlation_id": 8, "release": {"attempt_id": placed["attempt_id"]}},
    )
    assert streamed["correlation_id"] == "7" and streamed["placement"]["attempt_id"]
    call(
        address,
        f"{service}/RouteStream",
        {"release": {"attempt_id": streamed["placement"]["attempt_id"]}},
    )
    (stats,) = call(address, f"{service}/GetIndexStats", {})
    assert stats["holders"] == 2


@pytest.mark.parametrize("name", ["worker-0", "worker-1"])
async def test_worker_calls(cluster: Cluster, router: RouterClient, name: str) -> None:
    address = cluster.ready(name).address
    service = "forebay.worker.v1.WorkerService"
    (card,) = call(address, f"{service}/GetModelCard", {})
    assert card["card"]["model"] == MODEL and card["card"]["block_size_tokens"] == 32
    assert card["worker"]["id"] == name
    pieces = call(address, f"{service}/GetModelFile", {"name": "tokenizer_config.json"})
    assert pieces
    (_,) = call(address, f"{service}/ResetCache", {})
    generate = {
        "request_id": "hand-1",
        "attempt_id": "hand-1",
        "model": MODEL,
        "prompt_token_ids": PROMPT,
        "sampling": SAMPLING,
    }
    deltas = [m["delta"] for m in call(address, f"{service}/Generate", generate)]
    tokens = [t for d in deltas for t in d.get("token_ids", [])]
    assert len(tokens) == 3 and deltas[-1]["finish_reason"] == "FINISH_REASON_LENGTH"
    answers = call(
        address,
        f"{service}/Session",
        {"open": {"gateway_id": "by-hand"}},
        {"generate": generate | {"request_id": "hand-2", "attempt_id": "hand-2"}},
    )
    # grpcurl closes its side after the last message; the session then ends when the work is done,
    # or at once: both are ends of a session. What came must be right; frames without deltas are
    # signs of life.
    streamed = [t for a in answers for d in a.get("deltas", []) for t in d.get("token_ids", [])]
    assert streamed == tokens[: len(streamed)]
    (snapshot,) = call(address, f"{service}/Snapshot", {})
    assert snapshot["publisher"] == name
    assert len(snapshot["blocks"][0]["block_hashes"]) == 3


async def test_a_drain_by_hand(cluster: Cluster) -> None:
    address = cluster.ready("worker-1").address
    (drained,) = call(address, "forebay.worker.v1.WorkerService/Drain", {"timeout_ms": 2000})
    assert drained == {}
    cluster["worker-1"].kill()  # a drained worker stays up, not serving: the fixture restarts it
