"""HTTP itself: methods, shapes of errors, sizes, keys, CORS, many connections at once."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.client import chat_body, http_client, metrics, raw_stream
from tests.support.cluster import MODEL, Cluster
from tests.support.errors import openai_error

CHAT = "/v1/chat/completions"


def body(**extra: Any) -> dict[str, Any]:
    return chat_body(MODEL, "hi", **({"max_tokens": 4} | extra))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nope", 404),
        ("POST", "/v1/nope", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/", 404),
        ("GET", "/v1/chat", 404),
        ("GET", CHAT, 405),
        ("PUT", CHAT, 405),
        ("DELETE", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
    ],
)
async def test_12_paths_and_methods(
    client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await client.request(method, path, json=body() if method == "POST" else None)
    assert response.status_code == status
    openai_error(response)
    if status == 405:
        assert response.headers["allow"]
    await works(client)


async def test_15_models_with_slashes(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).raise_for_status().json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == [MODEL]
    for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny"):
        model = (await client.get(path)).raise_for_status().json()
        assert model["id"] == MODEL and model["object"] == "model" and model["created"] > 0
    for path in ("/v1/models/org/none", "/v1/models/tiny", "/v1/models/org%2Fnone"):
        response = await client.get(path)
        assert response.status_code == 404
        assert openai_error(response)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/v1/messages", "/tokenize"])
async def test_71_what_is_not_built_is_a_404_and_never_hangs(
    client: httpx.AsyncClient, path: str
) -> None:
    response = await client.post(path, json={"model": MODEL, "input": "hi"}, timeout=5)
    assert response.status_code == 404
    if path.startswith("/v1"):
        openai_error(response)
    await works(client)


@pytest.mark.parametrize("size", [1 << 10, 7 << 10, 33 << 10, 129 << 10, 1 << 20, 8 << 20])
@pytest.mark.parametrize("chunked", [False, True])
async def test_55_bodies_of_every_size(client: httpx.AsyncClient, size: int, chunked: bool) -> None:
    raw = json.dumps(body(metadata={"padding": "x" * size})).encode()

    async def pieces() -> Any:
        for start in range(0, len(raw), 60_000):
            yield raw[start : start + 60_000]

    content = pieces() if chunked else raw
    response = await client.post(CHAT, content=content)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("framing", [b"content-length: 1000000000", b"transfer-encoding: chunked"])
async def test_55_beyond_the_cap_is_a_413_without_reading_it_all(
    cluster: Cluster, client: httpx.AsyncClient, framing: bytes
) -> None:
    host, port = cluster.ready("gateway-0").address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        + framing
        + b"\r\n\r\n"
    )

    async def send_for_ever() -> None:
        piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
        while True:
            writer.write(piece)
            await writer.drain()

    sender = asyncio.create_task(send_for_ever())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert head.startswith(b"HTTP/1.1 413 "), head
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    error = json.loads(await asyncio.wait_for(reader.readexactly(length), 5))["error"]
    assert error["type"] == "invalid_request_error"
    with pytest.raises(OSError):  # the gateway closes, whatever else is sent
        await asyncio.wait_for(sender, 10)
    writer.close()
    await works(client)


async def test_56_keep_alive_serves_two_requests(cluster: Cluster) -> None:
    host, port = cluster.ready("gateway-0").address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body()).encode()
    for _ in range(2):
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 200 "), head
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
    writer.close()


async def test_57_head_and_options(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/v1/models"):
        response = await client.head(path)
        assert response.status_code == 200 and response.content == b""
    for path in (CHAT, "/v1/models"):
        assert (await client.options(path)).status_code in (200, 204)


async def test_57_cors_with_configuration(cluster: Cluster) -> None:
    cluster.start_gateway("gateway-cors", cors_origins="https://app.example")
    await cluster["gateway-cors"].until_ready()
    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with http_client(cluster.url("gateway-cors")) as client:
        response = await client.options(CHAT, headers=preflight)
        assert response.status_code in (200, 204)
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in response.headers["access-control-allow-headers"].lower()
        foreign = await client.options(CHAT, headers=preflight | {"origin": "https://evil.example"})
        assert foreign.headers.get("access-control-allow-origin") is None


@pytest.fixture
async def keyed(cluster: Cluster, tmp_path: Path) -> httpx.AsyncClient:
    """A client of a gateway that asks for keys, at debug level."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"sk-alpha-secret": "alpha", "sk-beta-secret": "beta"}))
    cluster.start_gateway("gateway-keys", api_keys_file=keys, log_level="debug")
    await cluster["gateway-keys"].until_ready()
    return httpx.AsyncClient(base_url=cluster.url("gateway-keys"), timeout=60, trust_env=False)


async def test_59_keys_guard_every_route(cluster: Cluster, keyed: httpx.AsyncClient) -> None:
    async with keyed:
        for method, path in (
            ("POST", CHAT),
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/org/tiny"),
            ("GET", "/v1/nope"),
            ("PUT", CHAT),
        ):
            for headers in ({}, {"authorization": "Bearer sk-wrong"}, {"authorization": "Basic x"}):
                response = await keyed.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path, response.text)
                assert openai_error(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"].startswith("Bearer")
        for path in ("/health", "/live", "/ready"):
            assert (await keyed.get(path)).status_code == 200
        good = {"authorization": "Bearer sk-alpha-secret"}
        assert (await keyed.post(CHAT, json=body(), headers=good)).status_code == 200
        assert (await keyed.get("/metrics", headers=good)).status_code == 404
    samples = await metrics(cluster.ready("gateway-keys").metrics_address)
    labels = {value for _, has in samples for _, value in has}
    assert not any("alpha" in v or "sk-" in v or "@" in v for v in labels)


async def test_60_keys_stay_out_of_the_logs(cluster: Cluster, keyed: httpx.AsyncClient) -> None:
    async with keyed:
        for key in ("sk-alpha-secret", "sk-wrong-secret"):
            headers = {"authorization": f"Bearer {key}", "x-api-key": key}
            await keyed.post(CHAT, json=body(user="someone"), headers=headers)
            await keyed.post(CHAT, json=body(max_tokens=0), headers=headers)
    await asyncio.sleep(0)
    for process in cluster.processes.values():
        log = process.log_text()
        assert "sk-alpha-secret" not in log and "sk-wrong-secret" not in log, process.name
    assert "debug" in cluster["gateway-keys"].log_text(), "the debug level was on"


async def test_64_two_thousand_streams_at_once(cluster: Cluster) -> None:
    address = cluster.ready("gateway-0").address
    bodies = [chat_body(MODEL, f"{i}", max_tokens=1) for i in range(2000)]
    answers = await asyncio.gather(*(raw_stream(address, CHAT, body) for body in bodies))
    assert [head for head, _ in answers if not head.startswith(b"HTTP/1.1 200 ")] == []
    for _, body in answers:
        assert body.count(b'"finish_reason":"length"') == 1
        assert b"data: [DONE]" in body and b'"error"' not in body
    for name in ("worker-0", "worker-1"):
        assert any(f"x-forebay-worker: {name}".encode() in head for head, _ in answers)


async def works(client: httpx.AsyncClient) -> None:
    """The next request always works."""
    response = await client.post(CHAT, json=body())
    assert response.status_code == 200, response.text
