"""HTTP to the cluster: health of etcd and the gateway, and OpenAI chat, plain and streamed."""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from services.cli.errors import RequestFailed
from services.cli.up.spec import Probe, Ready

HEADER_WORKER = "x-forebay-worker"
HEADER_PREDICTED = "x-forebay-predicted-cached-tokens"
_HEALTH_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to a chat request."""

    text: str
    worker: str
    """Id of the worker that served it; empty when the gateway doesn't say."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, as the engine counted."""
    predicted_cached_tokens: int
    """As the router expected before."""
    ttft_s: float
    """From sending to the first text, in seconds; for a plain request to the whole answer."""
    tokens: tuple[str, ...] = ()
    """Tokens of a streamed answer, when `logprobs` was asked for."""
    arrivals_s: tuple[float, ...] = ()
    """When each of these came, by time.perf_counter()."""


def _client(timeout_s: float) -> httpx.AsyncClient:
    # trust_env off: a proxy from the environment has no business between us and our own cluster.
    return httpx.AsyncClient(timeout=timeout_s, trust_env=False)


async def is_ok(url: str, timeout_s: float = _HEALTH_TIMEOUT_S) -> bool:
    """Whether a GET is answered with 200."""
    try:
        async with _client(timeout_s) as client:
            return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


async def metrics(address: str, timeout_s: float = _HEALTH_TIMEOUT_S) -> dict[str, float]:
    """The process's Prometheus samples by name, summed over labels. Raises RequestFailed."""
    try:
        async with _client(timeout_s) as client:
            text = (await client.get(f"http://{address}/metrics")).raise_for_status().text
    except httpx.HTTPError as exc:
        raise RequestFailed(f"no metrics from {address}: {_words(exc)}") from exc
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def etcd_probe(address: str) -> Probe:
    """Ready when the etcd at host:port says that it is healthy."""

    async def probe(pid: int) -> Ready | None:
        return Ready(address=address) if await etcd_healthy(address) else None

    return probe


async def etcd_healthy(address: str, *, scheme: str = "http") -> bool:
    """Whether the etcd member at host:port can serve."""
    return await is_ok(f"{scheme}://{address}/health")


class ChatClient:
    """A keep-alive client of one gateway; made by `open_chat`."""

    def __init__(self, client: httpx.AsyncClient, base_url: str, api_key: str) -> None:
        self._client = client
        self._url = f"{base_url}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def ask(self, model: str, prompt: str, **fields: Any) -> ChatAnswer:
        """One plain chat request. Raises RequestFailed with the gateway's own message."""
        body = _body(model, prompt, fields)
        started = time.perf_counter()
        try:
            response = await self._client.post(self._url, json=body, headers=self._headers)
        except httpx.HTTPError as exc:
            raise RequestFailed(f"no answer from {self._url}: {_words(exc)}") from exc
        if response.status_code != 200:
            raise RequestFailed(_refusal(response.status_code, response.content))
        data = response.json()
        return _answer(
            data["choices"][0]["message"]["content"] or "",
            data.get("usage") or {},
            response.headers,
            time.perf_counter() - started,
        )

    async def stream(
        self,
        model: str,
        prompt: str,
        *,
        worker: str = "",
        enough: Callable[[], bool] = lambda: False,
        **fields: Any,
    ) -> ChatAnswer:
        """One streamed chat request, read to its end; `worker`: the only one that will do.

        Or until `enough`, which is asked at each token: then the answer is what has come so far. An
        error event too raises RequestFailed.
        """
        headers = {**self._headers, **({HEADER_WORKER: worker} if worker else {})}
        body = _body(model, prompt, fields)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        started, first = time.perf_counter(), 0.0
        usage: dict[str, Any] = {}
        pieces: list[str] = []
        tokens: list[str] = []
        arrivals: list[float] = []
        try:
            async with self._client.stream(
                "POST", self._url, json=body, headers=headers
            ) as response:
                if response.status_code != 200:
                    raise RequestFailed(_refusal(response.status_code, await response.aread()))
                async for event in _events(response):
                    if "error" in event:
                        raise RequestFailed(f"the stream broke: {event['error'].get('message')}")
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        if piece := choice.get("delta", {}).get("content"):
                            first = first or time.perf_counter()
                            pieces.append(piece)
                        told = (choice.get("logprobs") or {}).get("content") or ()
                        tokens += [position["token"] for position in told]
                        arrivals += [time.perf_counter()] * len(told)
                    if pieces and enough():
                        break
                told_by = response.headers
        except httpx.HTTPError as exc:
            raise RequestFailed(f"no answer from {self._url}: {_words(exc)}") from exc
        if not pieces:
            raise RequestFailed("the stream ended without any text")
        answer = _answer("".join(pieces), usage, told_by, first - started)
        return replace(answer, tokens=tuple(tokens), arrivals_s=tuple(arrivals))


@asynccontextmanager
async def open_chat(
    base_url: str, *, api_key: str = "", timeout_s: float = 120.0
) -> AsyncIterator[ChatClient]:
    """A client of the gateway at `base_url` (without /v1)."""
    async with _client(timeout_s) as client:
        yield ChatClient(client, base_url, api_key)


def _body(model: str, prompt: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": prompt}], **fields}


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _answer(
    text: str, usage: Mapping[str, Any], headers: Mapping[str, str], ttft_s: float
) -> ChatAnswer:
    details = usage.get("prompt_tokens_details") or {}
    return ChatAnswer(
        text=text,
        worker=headers.get(HEADER_WORKER, ""),
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        completion_tokens=int(usage.get("completion_tokens", 0)),
        cached_tokens=int(details.get("cached_tokens") or 0),
        predicted_cached_tokens=int(headers.get(HEADER_PREDICTED, 0)),
        ttft_s=ttft_s,
    )


def _refusal(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return f"the gateway answered {status}: {message}"


def _words(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
