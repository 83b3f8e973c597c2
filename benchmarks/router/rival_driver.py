"""Drives NVIDIA Dynamo's index and selection service. Runs under the rival's own interpreter, so it
imports nothing of ours: commands come as JSON lines, answers go back as JSON lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

os.environ.setdefault("DYN_LOG", "error")

import dynamo._core as rival  # type: ignore[import-not-found, unused-ignore]


def rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median and best microseconds of a call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e6)
    times.sort()
    return {"best_us": times[0], "p50_us": times[len(times) // 2]}


def tree(
    workers: int, chains: int, length: int, batch: int, seed: int, asked: list[int]
) -> dict[str, Any]:
    """Fills its radix tree with `chains` of `length` blocks, dealt to workers; then asks it."""
    rng = random.Random(seed)
    index = rival.RadixTree()
    all_chains = [[rng.getrandbits(63) for _ in range(length)] for _ in range(chains)]
    events: list[tuple[int, bytes]] = []
    for i, chain in enumerate(all_chains):
        for start in range(0, length, batch):
            part = chain[start : start + batch]
            stored = {
                "parent_hash": chain[start - 1] if start else None,
                "blocks": [
                    {"block_hash": key, "tokens_hash": key, "mm_extra_info": None} for key in part
                ],
            }
            event = {"event_id": len(events), "data": {"stored": stored}, "dp_rank": 0}
            events.append((i % workers, json.dumps(event).encode()))
    before = rss_bytes()
    started = time.process_time()
    for worker, event_bytes in events:
        index.apply_event(worker, event_bytes)
    found = index.find_matches(all_chains[-1]).scores  # Waits until all is applied.
    spent = time.process_time() - started
    assert max(found.values()) == length, found
    blocks = chains * length
    return {
        "blocks": blocks,
        "event_us": spent / blocks * 1e6,
        "bytes_block": (rss_bytes() - before) / blocks,
        "find": {
            n: timed(lambda n=n: index.find_matches(rng.choice(all_chains)[:n]), 60)  # type: ignore[misc]
            for n in asked
        },
    }


class Service:
    """Its selection service, inside this process."""

    def __init__(self) -> None:
        self.service: Any = rival.SelectionService(indexer_threads=1)

    async def workers(self, addresses: list[str], block_size: int) -> dict[str, Any]:
        """Makes it follow the event streams at these addresses."""
        for number, address in enumerate(addresses):
            await self.service.upsert_worker(
                {
                    "worker_id": number,
                    "model_name": "m",
                    "endpoint": "http://127.0.0.1:1/v1",
                    "block_size": block_size,
                    "kv_events_endpoint": address,
                    "total_kv_blocks": 1 << 20,
                }
            )
        return {}

    async def overlap(self, tokens: list[int]) -> dict[str, Any]:
        """Its overlap of a prompt at each worker."""
        answer = await self.service.overlap_scores({"model_name": "m", "token_ids": tokens})
        return {"scores": answer}

    async def ask(self, method: str, request: Any) -> dict[str, Any]:
        """Any of its methods."""
        answer = getattr(self.service, method)(request)
        return {"answer": await answer if hasattr(answer, "__await__") else answer}

    async def select(
        self, prompts: list[list[int]], block_size: int, repeats: int
    ) -> dict[str, Any]:
        """Seconds of decisions: from hashes, and from tokens."""
        times: dict[str, list[float]] = {"hashes": [], "tokens": []}
        matched = 0
        for number in range(repeats):
            tokens = prompts[number % len(prompts)]
            hashes = rival.compute_block_hash_for_seq(tokens, block_size)
            local = [h - (1 << 64) if h >> 63 else h for h in hashes]
            by_hash = {
                "model_name": "m",
                "block_hashes": local,
                "sequence_hashes": local,
                "isl_tokens": len(tokens),
            }
            for kind, request in (
                ("hashes", by_hash),
                ("tokens", {"model_name": "m", "token_ids": tokens}),
            ):
                started = time.perf_counter()
                answer = await self.service.select(request)
                times[kind].append((time.perf_counter() - started) * 1e6)
                matched = answer["overlap"]["longest_matched"]
        result: dict[str, Any] = {"matched": matched}
        for kind, all_times in times.items():
            all_times.sort()
            result[kind] = {"best_us": all_times[0], "p50_us": all_times[len(all_times) // 2]}
        return result


async def main() -> None:
    """Answers until stdin ends."""
    service = Service()
    commands: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
        "workers": service.workers,
        "overlap": service.overlap,
        "ask": service.ask,
        "select": service.select,
    }
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        operation = command.pop("op")
        cpu = time.process_time()
        try:
            if operation == "tree":
                answer = tree(**command)
            elif operation == "cpu":
                answer = {"rss_bytes": rss_bytes()}
            else:
                answer = await commands[operation](**command)
        except Exception as exc:
            # The other side must hear what went wrong, whatever it was.
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        answer |= {"cpu_s": time.process_time(), "spent_s": time.process_time() - cpu}
        print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
