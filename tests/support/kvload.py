"""Load on the workers of a kvbm cluster: prompts whose answers are known, asked again and again.

Every answer is compared with its reference. Some requests are abandoned at a random moment.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import grpc

from tests.support.kvcluster import KvCluster

Tokens = tuple[int, ...]


class Load:
    """What the requests of one load came to."""

    def __init__(
        self,
        kv: KvCluster,
        workers: Sequence[str],
        prompts: Sequence[Tokens],
        references: Sequence[Tokens],
        *,
        seed: int,
        abort_share: float = 0.0,
    ) -> None:
        self.answered: Counter[str] = Counter()
        """Good answers, by worker."""
        self.cached = 0
        self.prompt_tokens = 0
        self.aborted = 0
        self.failed: list[tuple[str, str]] = []
        """Worker and error of requests that failed."""
        self.wrong: list[tuple[str, int, Tokens]] = []
        """Worker, number of the prompt and tokens of answers that differ from the reference."""
        self._kv = kv
        self._workers = list(workers)
        self._prompts = prompts
        self._references = references
        self._abort_share = abort_share
        self._seed = seed
        self._stopping = False

    async def client(self, number: int) -> None:
        """One client: asks, compares, asks again."""
        rng = random.Random(f"{self._seed}/{number}")
        while not self._stopping:
            # Some prompts come back much more often than others.
            which = min(int(rng.expovariate(4 / len(self._prompts))), len(self._prompts) - 1)
            worker = rng.choice(self._workers)
            leaves = rng.random() < self._abort_share
            try:
                async with asyncio.timeout(rng.expovariate(10.0) if leaves else None):
                    answer = await self._kv.ask(worker, self._prompts[which])
            except TimeoutError:
                self.aborted += 1
                continue
            except (grpc.aio.AioRpcError, AssertionError) as exc:
                self.failed.append((worker, repr(exc)[:300]))
                await asyncio.sleep(0.05)
                continue
            if answer.error:
                self.failed.append((worker, answer.error))
            elif answer.tokens != self._references[which]:
                self.wrong.append((worker, which, answer.tokens))
            else:
                self.answered[worker] += 1
                self.cached += answer.cached
                self.prompt_tokens += len(self._prompts[which])

    def stop(self) -> None:
        """No client asks again."""
        self._stopping = True

    async def goes_on(self, *workers: str, answers: int = 4, within_s: float = 30) -> None:
        """Waits until each of these workers has answered so many more."""
        start = Counter(self.answered)
        async with asyncio.timeout(within_s):
            while any(self.answered[w] < start[w] + answers for w in workers):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def load(
    kv: KvCluster,
    workers: Sequence[str],
    prompts: Sequence[Tokens],
    references: Sequence[Tokens],
    *,
    seed: int,
    at_once: int = 8,
    abort_share: float = 0.0,
) -> AsyncIterator[Load]:
    """Load while the context lasts; at its end the last answers are awaited."""
    running = Load(kv, workers, prompts, references, seed=seed, abort_share=abort_share)
    clients = [asyncio.create_task(running.client(n)) for n in range(at_once)]
    try:
        yield running
    except BaseException:
        for client in clients:
            client.cancel()
        raise
    finally:
        running.stop()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*clients)


async def references(
    kv: KvCluster, worker: str, prompts: Sequence[Tokens], *, salted: bool = False
) -> list[Tokens]:
    """Tokens of fresh computations: no tier and no cache has anything of these prompts.

    `salted`: under salts of their own, for prompts that begin alike.
    """
    if salted:
        answers = [
            await kv.ask(worker, tokens, cache_salt=f"reference {number}")
            for number, tokens in enumerate(prompts)
        ]
    else:
        answers = await kv.ask_all([worker], prompts)
    assert not any(a.error for a in answers), answers
    assert all(a.cached == 0 for a in answers), "something had these prompts already"
    tokens = [a.tokens for a in answers]
    assert len(set(tokens)) == len(prompts), "outputs must depend on their prompts"
    return tokens
