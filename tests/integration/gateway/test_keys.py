"""API keys: asked for on every path but health; tenants kept apart; nothing of them told."""

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from services.common.telemetry.logging import setup_logging
from tests.support.client import completion_body

PROMPT = list(range(100, 180))


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.json"
    digest = hashlib.sha256(b"sk-two").hexdigest()
    path.write_text(
        json.dumps(
            {
                "sk-one": "tenant-one",
                f"sha256:{digest}": "tenant-two",
                "sk-open": {"tenant": "tenant-open", "share_cache": True},
            }
        )
    )
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_every_path_asks(rig: Any, keys: str) -> None:
    async with rig(api_keys_file=keys) as r:
        for method, path in [
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/tiny"),
            ("GET", "/v1/nope"),
            ("PUT", "/v1/chat/completions"),
        ]:
            for headers in ({}, bearer("wrong"), {"authorization": "Basic sk-one"}):
                answer = await r.client.request(method, path, headers=headers)
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/live", "/ready"):
            assert (await r.client.get(path)).status_code == 200
        for key in ("sk-one", "sk-two", "sk-open"):
            assert (await r.client.get("/v1/models", headers=bearer(key))).status_code == 200


async def test_tenants_never_share_a_block(rig: Any, keys: str) -> None:
    async with rig(api_keys_file=keys) as r:

        async def cached(key: str, **extra: Any) -> int:
            answer = await r.client.post(
                "/v1/completions",
                json=completion_body("tiny", PROMPT, max_tokens=1, **extra),
                headers=bearer(key),
            )
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [await cached("sk-one"), await cached("sk-one")] == [0, 64]
        assert [await cached("sk-two"), await cached("sk-two")] == [0, 64]
        assert [await cached("sk-open"), await cached("sk-open")] == [0, 64]
        # One tenant can't reach another's blocks by naming its salt.
        assert await cached("sk-two", cache_salt="tenant-one") == 0
        assert [q.tenant for q in r.worker.requests[:3:2]] == ["tenant-one", "tenant-two"]
        assert r.router.requests[0].tenant == "tenant-one"
        assert len({q.cache_salt for q in r.worker.requests}) == 4


@pytest.fixture
def kept_logging() -> Iterator[None]:
    """Leaves logging as it was before the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("kept_logging")
async def test_metrics_tell_nothing(
    rig: Any, keys: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("gateway", level="debug")
    async with rig(api_keys_file=keys) as r:
        await r.client.post(
            "/v1/completions",
            json=completion_body("tiny", PROMPT, max_tokens=1, user="a@b.example"),
            headers=bearer("sk-one"),
        )
        await r.client.get("/v1/models", headers=bearer("sk-wrong-one"))
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://{r.metrics_address}/metrics")).text
        for secret in ("sk-", "tenant-one", "a@b.example", hashlib.sha256(b"sk-one").hexdigest()):
            assert secret not in text
    logged = "".join(capsys.readouterr())
    assert '"request"' in logged
    for secret in ("sk-one", "sk-wrong-one", "a@b.example"):
        assert secret not in logged
