"""Two real engines over one kvbm, driven directly with token ids: what tiers do, without the rest.

Caches of engines are small, so that tiers matter; the daemon has memory, disk and a shared folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.common.v1 import common_pb2
from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc as pb_grpc
from forebay.worker.v1 import worker_pb2

from services.common.blocks import block_hashes
from services.common.rpc.channel import open_channel
from tests.support.client import WorkerClient, metric
from tests.support.cluster import MODEL, Cluster, EtcdServer
from tests.support.etcd import free_port
from tests.support.polling import PROGRESS_S, until

BLOCK = 32
G2, G3, G4 = common_pb2.TIER_G2, common_pb2.TIER_G3, common_pb2.TIER_G4


@dataclass(frozen=True)
class Answer:
    """What a worker made of a prompt."""

    tokens: tuple[int, ...]
    cached: int
    error: str = ""


def prompt(seed: int, blocks: int, extra: int = 5) -> tuple[int, ...]:
    """Random tokens: full blocks, and a few more."""
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 2048) for _ in range(blocks * BLOCK + extra))


class KvCluster:
    """The processes, and questions to them."""

    def __init__(self, cluster: Cluster, folder: Path, flags: dict[str, object]) -> None:
        self.cluster = cluster
        self.folder = folder
        self.flags = flags
        """The daemon's."""

    @property
    def kvbm(self) -> str:
        """The daemon's address; the same in every life."""
        return self.cluster.ready("kvbm-0").address

    @property
    def arena_dir(self) -> Path:
        """Folder of the daemon's arenas, locks and owners."""
        return Path(str(self.flags["cpu_cache_dir"]))

    @property
    def disk_dir(self) -> Path:
        return Path(str(self.flags["disk_cache_dir"]))

    @property
    def arenas(self) -> list[Path]:
        return sorted(self.arena_dir.glob("*.arena"))

    @property
    def namespace(self) -> bytes:
        """The one namespace that these arenas are of."""
        (path,) = self.arenas
        return bytes.fromhex(path.stem)

    async def ask(
        self, worker: str, tokens: Sequence[int], *, max_tokens: int = 8, **more: Any
    ) -> Answer:
        """Greedy output of one worker."""
        request = worker_pb2.GenerateRequest(
            request_id=f"r{random.getrandbits(60)}",
            model=MODEL,
            prompt_token_ids=tokens,
            sampling=worker_pb2.SamplingParams(
                max_tokens=max_tokens, temperature=0.0, ignore_eos=True
            ),
            **more,
        )
        out: list[int] = []
        cached = 0
        error = ""
        async with WorkerClient(self.cluster.ready(worker).address) as client:
            async for message in client.stub.Generate(request, timeout=120):
                out += message.delta.token_ids
                if message.delta.HasField("cached_tokens"):
                    cached = message.delta.cached_tokens
                if message.delta.HasField("error"):
                    error = message.delta.error.message
        return Answer(tuple(out), cached, error)

    async def ask_all(
        self,
        workers: Sequence[str],
        prompts: Sequence[Sequence[int]],
        *,
        at_once: int = 8,
        **more: Any,
    ) -> list[Answer]:
        """All prompts, dealt to the workers in turn, so many at a time."""
        lane = asyncio.Semaphore(at_once)

        async def one(number: int, tokens: Sequence[int]) -> Answer:
            async with lane:
                return await self.ask(workers[number % len(workers)], tokens, **more)

        return await asyncio.gather(*(one(n, t) for n, t in enumerate(prompts)))

    async def forget_g1(self, *workers: str) -> None:
        """Empties engines' own caches; waits while saves still hold some blocks."""
        for name in workers:
            async with WorkerClient(self.cluster.ready(name).address) as client:

                async def reset(client: WorkerClient = client) -> bool:
                    try:
                        await client.reset_cache()
                    except Exception as exc:
                        if "CACHE_IN_USE" in str(exc) or "in use" in str(exc).lower():
                            return False
                        raise
                    return True

                await until(reset, within_s=20, what=f"an idle {name}", every_s=0.05)

    @contextlib.asynccontextmanager
    async def daemon(self) -> Any:
        """The daemon's stub."""
        async with open_channel(self.kvbm) as channel:
            yield pb_grpc.KvbmServiceStub(channel)  # type: ignore[no-untyped-call]

    async def stats(self) -> pb.StatsResponse:
        async with self.daemon() as stub:
            answer: pb.StatsResponse = await stub.Stats(pb.StatsRequest(), timeout=10)
            return answer

    async def counter(self, name: str) -> float:
        return float((await self.stats()).counters.get(name, 0.0))

    async def clear(self, *tiers: int) -> None:
        async with self.daemon() as stub:
            await stub.Clear(pb.ClearRequest(everything=True, tiers=tiers), timeout=30)

    async def tiers_of(self, tokens: Sequence[int]) -> list[set[int]]:
        """Tiers of each full block of a prompt."""
        stats = await self.stats()
        if not stats.namespaces:
            return []
        keys = block_hashes(tokens, BLOCK)
        lookup = pb.LookupRequest(namespace=stats.namespaces[0].namespace, keys=keys)
        async with self.daemon() as stub:
            answer = await stub.Explain(pb.ExplainRequest(lookup=lookup), timeout=10)
        return [set(b.tiers) for b in answer.blocks]

    async def until_in(self, tier: int, prompts: Sequence[Sequence[int]], within_s: float) -> None:
        """Waits until every full block of all prompts is in a tier."""

        async def missing() -> int:
            tiers = [await self.tiers_of(p) for p in prompts]
            return sum(tier not in t for blocks in tiers for t in blocks) + (not tiers[0])

        await until(
            missing, lambda n: n == 0, within_s=within_s, what="blocks in their tier", every_s=0.1
        )

    async def until_saved(self, workers: Sequence[str], prompts: Sequence[Sequence[int]]) -> None:
        """Asks anew for prompts with blocks that no tier has, until there are none.

        A block that finds no slot while its request lasts is passed over: saves wait for nothing.
        """

        async def lost() -> int:
            gone = [p for p in prompts if not all(await self.tiers_of(p))]
            await self.ask_all(workers, gone)
            return len(gone)

        await until(
            lost, lambda n: n == 0, within_s=PROGRESS_S, what="all blocks saved", every_s=0.2
        )

    async def at_rest(self) -> None:
        """Waits until no lease is held and nothing is quarantined."""

        async def held() -> tuple[int, int]:
            stats = await self.stats()
            return (
                sum(n.leases for n in stats.namespaces),
                sum(t.quarantined for t in stats.tiers),
            )

        await until(held, lambda h: h == (0, 0), within_s=20, what="leases and quarantine at 0")

    async def attached(self) -> None:
        """Waits until all live workers are attached to the daemon, ask it, and save into it."""
        workers = [n for n, p in self.cluster.processes.items() if n[:6] == "worker" and p.alive]

        async def known() -> set[str]:
            return {w for n in (await self.stats()).namespaces for w in n.workers}

        await until(known, lambda k: k >= set(workers), within_s=30, what="workers attached")
        for name in workers:
            # What it had not told of a former daemon's life comes with the first step.
            await self._saves(name)
            await until(
                lambda n=name: self._saves(n),
                within_s=PROGRESS_S,
                what=f"saves of {name}",
                every_s=0.1,
            )

    async def _saves(self, worker: str) -> bool:
        """Whether a worker asks the daemon and has told of a new block committed. Each call brings
        a new block: one that had given the daemon up tries again with a request.
        """
        address = self.cluster.ready(worker).metrics_address

        async def committed() -> float:
            name = "forebay_worker_kvbm_events_total"
            return await metric(address, name, event="commit_stored")

        before = await committed()
        await self.ask(worker, prompt(random.getrandbits(60), 1), max_tokens=2)
        if await metric(address, "forebay_worker_kvbm_breaker_open"):
            return False
        return await committed() > before

    async def scrub(self) -> tuple[int, int]:
        """Verifies all blocks in memory and on disk now: how many, and how many were bad."""
        async with self.daemon() as stub:
            async for progress in stub.Scrub(pb.ScrubRequest(), timeout=60):
                last = progress
        assert last.done
        return last.scanned, last.corrupt

    def start_worker(self, name: str, **flags: object) -> None:
        """Starts a worker that attaches to the daemon; `flags` win."""
        basic: dict[str, object] = {
            "kvbm": f"127.0.0.1:{self.flags['port']}",
            # Generous: on a busy machine a late answer is a miss, and tests count hits.
            "kvbm_timeout_s": 5,
            "kv_cache_gb": 0.04,
            "max_model_len": 2048,
        }
        self.cluster.start_worker(name, **(basic | flags))

    def replace_daemon(self, folder: Path, **flags: object) -> None:
        """Another daemon at the same address, with memory and disk of its own in `folder`.

        `flags` are added to what a cluster's first daemon gets.
        """
        self.cluster.processes.pop("kvbm-0").close()
        self.flags = daemon_flags(folder, int(self.flags["port"]), **flags)  # type: ignore[call-overload]
        self.cluster.start("services.kvbm", "kvbm-0", **self.flags)
        self.cluster["kvbm-0"].wait_ready()

    def restart(self, *names: str, kill: bool = True) -> None:
        """Ends processes, by kill -9 unless told otherwise, and starts them again."""
        for name in names:
            if kill:
                self.cluster[name].kill()
            else:
                self.cluster[name].terminate()
                self.cluster[name].wait_ended(30)
        for name in names:
            self.cluster[name].start()
        for name in names:
            self.cluster[name].wait_ready()


def daemon_flags(folder: Path, port: int, **flags: object) -> dict[str, object]:
    """What daemons of these tests are told; `flags` win."""
    return {
        "port": port,
        "events_port": 0,
        "cpu_cache_gb": 0.125,
        "cpu_cache_dir": folder / "arenas",
        "disk_cache_gb": 0.25,
        "disk_cache_dir": folder / "disk",
        "disk_free_gb": 0,
        "disk_write_mb_s": 1000,
        # The tiny model computes a block faster than any disk reads one.
        "gate": "always",
        **flags,
    }


@contextlib.contextmanager
def open_kv_cluster(
    folder: Path,
    etcd: EtcdServer,
    model: Path,
    *,
    workers: int = 2,
    worker_flags: Mapping[str, object] | None = None,
    **flags: object,
) -> Iterator[KvCluster]:
    """A ready kvbm and workers attached to it; `flags` are the daemon's."""
    cluster = Cluster(folder, etcd, model)
    port = free_port()
    kvbm = daemon_flags(folder, port, **flags)
    kv = KvCluster(cluster, folder, kvbm)
    try:
        cluster.start("services.kvbm", "kvbm-0", **kvbm)
        cluster["kvbm-0"].wait_ready()
        for number in range(workers):
            kv.start_worker(f"worker-{number}", **(worker_flags or {}))
        for process in cluster.processes.values():
            process.wait_ready(180)
        yield kv
    finally:
        cluster.close()
