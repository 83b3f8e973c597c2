"""Real engines that hand KV to each other, driven directly with token ids: both legs, no router."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.worker.v1 import worker_pb2 as pb

from tests.support.client import WorkerClient, metric
from tests.support.cluster import MODEL, Cluster
from tests.support.polling import until

BLOCK = 32


@dataclass(frozen=True)
class Told:
    """What a worker said of one request."""

    tokens: tuple[int, ...]
    cached: int = 0
    transferred: int = 0
    handle: pb.TransferHandle | None = None
    error: str = ""


def prompt(seed: int, tokens: int) -> tuple[int, ...]:
    """Random tokens."""
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 2048) for _ in range(tokens))


class Pairs:
    """A cluster's workers, and questions to them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def address(self, worker: str) -> str:
        return self.cluster.ready(worker).address

    async def ask(
        self, worker: str, tokens: Sequence[int], *, max_tokens: int = 12, **more: Any
    ) -> Told:
        """One request, greedy."""
        request = pb.GenerateRequest(
            request_id=more.pop("request_id", f"r{random.getrandbits(60)}"),
            model=MODEL,
            prompt_token_ids=tokens,
            sampling=pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            **more,
        )
        out: list[int] = []
        cached = transferred = 0
        handle, error = None, ""
        async with WorkerClient(self.address(worker)) as client:
            async for message in client.stub.Generate(request, timeout=120):
                delta = message.delta
                out += delta.token_ids
                if delta.HasField("cached_tokens"):
                    cached, transferred = delta.cached_tokens, delta.transferred_tokens
                if delta.HasField("transfer"):
                    handle = delta.transfer
                if delta.HasField("error"):
                    error = delta.error.message
        return Told(tuple(out), cached, transferred, handle, error)

    async def apart(
        self, prefill: str, decode: str, tokens: Sequence[int], **more: Any
    ) -> tuple[Told, Told]:
        """Both legs."""
        first = await self.ask(prefill, tokens, prefill_only=True)
        assert first.handle is not None, first
        return first, await self.ask(decode, tokens, transfer=first.handle, **more)

    async def forget(self, *workers: str) -> None:
        """Empties engines' caches."""
        for name in workers:
            async with WorkerClient(self.address(name)) as client:
                await client.reset_cache()

    async def held(self, worker: str) -> int:
        """Prefills whose KV waits to be taken, by the worker's figures."""
        address = self.cluster.ready(worker).metrics_address
        return int(await metric(address, "forebay_worker_held_transfers"))

    async def transfers(self, worker: str, result: str) -> int:
        """Transfers counted so far, by result."""
        address = self.cluster.ready(worker).metrics_address
        return int(await metric(address, "forebay_worker_transfers_total", result=result))

    async def at_rest(self, *workers: str, within_s: float = 20) -> None:
        """Waits until nothing runs and nothing is held."""
        for name in workers:
            async with WorkerClient(self.address(name)) as client:

                async def idle(client: WorkerClient = client, name: str = name) -> bool:
                    load = (await client.snapshot()).load
                    busy = load.running_requests + load.waiting_requests + load.used_blocks
                    return not busy and await self.held(name) == 0

                await until(idle, within_s=within_s, what=f"{name} at rest")
