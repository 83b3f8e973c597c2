"""`forebay demo routing`: the experiment that made KV-aware routing known, on two real workers.

The same long prompt, one request after the other, under round-robin and then under kv, caches
empty at each start. The next request goes out only when the router's index equals the workers' own
block pools, so that what is compared is the policies and not the speed of events.
"""

import asyncio
import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.cli.adapters.http import ChatAnswer, ChatClient, open_chat
from services.cli.adapters.rpc import RouterClient, WorkerClient, open_router, open_worker
from services.cli.console import stderr
from services.cli.demo.picture import draw
from services.cli.demo.prompt import PROMPT
from services.cli.errors import RequestFailed
from services.cli.model import Model
from services.cli.up.options import UpOptions
from services.cli.up.plan import Ports, service_specs
from services.cli.up.run import Cluster, StopRequests, run_cluster, wait_serving
from services.cli.up.view import LiveReporter, PlainReporter, Reporter
from services.common.errors import FailedPrecondition

POLICIES = ("round-robin", "kv")
_LEAST_PROMPT_TOKENS = 300
_NEW_TOKENS = 8
_SETTLE_S = 15.0
_LOOK_EVERY_S = 0.02
_RESTART_S = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """What one policy did, request by request."""

    workers: tuple[str, ...]
    """Ids of all workers, whether they served or not."""
    answers: tuple[ChatAnswer, ...]

    def to_json(self) -> dict[str, Any]:
        """The published form: counts by worker, tokens, seconds."""
        served = Counter(a.worker for a in self.answers)
        return {
            "per_worker": {worker: served[worker] for worker in self.workers},
            "cached_tokens": [a.cached_tokens for a in self.answers],
            "predicted_cached_tokens": [a.predicted_cached_tokens for a in self.answers],
            "ttft_s": [round(a.ttft_s, 4) for a in self.answers],
        }


def run_demo(
    model: Model, *, requests: int, as_json: bool, output: Path, console: Console
) -> dict[str, Run]:
    """Runs it, prints a table (or JSON alone) and draws `output`. Raises CliError when it can't."""
    progress = stderr()
    reporter: Reporter = LiveReporter(progress) if progress.is_terminal else PlainReporter(progress)
    try:
        with tempfile.TemporaryDirectory(prefix="forebay-demo-") as state_dir:
            runs = asyncio.run(_measure(model, Path(state_dir), requests, reporter))
    finally:
        reporter.close()
    draw({policy: run.answers for policy, run in runs.items()}, model.served_name, output)
    if as_json:
        console.file.write(json.dumps({p: run.to_json() for p, run in runs.items()}) + "\n")
    else:
        for policy, run in runs.items():
            console.print(_table(policy, run))
        console.print(f"\nPicture: {output}")
    return runs


async def _measure(
    model: Model, state_dir: Path, requests: int, reporter: Reporter
) -> dict[str, Run]:
    options = UpOptions(
        state_dir=str(state_dir),
        model=model.location,
        served_model_name=model.served_name,
        workers=2,
        policy=POLICIES[0],
        auto_ports=True,
        kvbm=False,  # what is compared is placement by the engines' own caches
        float32=True,
        drain_timeout_s=5.0,
    )
    stop = StopRequests()
    stop.on_signals()
    runs: dict[str, Run] = {}

    async def serve(cluster: Cluster) -> None:
        for policy in POLICIES:
            if cluster.state.policy != policy or policy != options.policy:
                await _change_policy(cluster, replace(options, policy=policy))
            reporter.note(f"{requests} requests under {policy}")
            runs[policy] = await _one_policy(cluster, requests)

    await run_cluster(options, reporter, stop, serve)
    if stop.asked.is_set():
        raise KeyboardInterrupt
    return runs


async def _change_policy(cluster: Cluster, options: UpOptions) -> None:
    """A new router with another policy in the place of the old one."""
    ports = Ports(0, 0, ((0, 0),), (), int(cluster.state.etcd_endpoints.rpartition(":")[2]), 0)
    router = next(s for s in service_specs(options, ports) if s.kind == "router")
    await cluster.supervisor.stop([router.name], 10.0)
    cluster.supervisor.start(router)
    await cluster.supervisor.wait_ready([router.name], _RESTART_S)
    await wait_serving(cluster, _RESTART_S)


class _Watch:
    """Router and workers of the demo, to see when they agree."""

    def __init__(self, router: RouterClient, workers: dict[str, WorkerClient]) -> None:
        self._router = router
        self._workers = workers

    async def reset(self) -> None:
        """Empties every worker's cache; waits for what still runs there."""
        async with asyncio.timeout(_SETTLE_S):
            for worker in self._workers.values():
                while True:
                    with contextlib.suppress(FailedPrecondition):
                        await worker.reset_cache()
                        break
                    await asyncio.sleep(_LOOK_EVERY_S)
        await self.settled()

    async def settled(self) -> None:
        """Returns when nothing runs and the router's index equals each worker's own blocks."""
        began = time.monotonic()
        while True:
            if await self._agree():
                return
            if time.monotonic() - began > _SETTLE_S:
                raise RequestFailed(
                    f"the router's index still differs from the workers' after {_SETTLE_S:g} s"
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _agree(self) -> bool:
        listed = await self._router.list_workers()
        if any(w.running or w.waiting or w.booked for w in listed.workers):
            return False
        indexed = await self._router.digests()
        for worker_id, worker in self._workers.items():
            own = await worker.digest()
            known = indexed.get(worker_id)
            # A worker without blocks need not be in the index at all.
            if known is None:
                if own.blocks:
                    return False
            elif not known.same_blocks(own):
                return False
        return True


@asynccontextmanager
async def _watching(cluster: Cluster) -> AsyncIterator[_Watch]:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            open_router(cluster.state.of_kind("router")[0].ready.address)
        )
        workers = {
            w.name: await stack.enter_async_context(open_worker(w.ready.address))
            for w in cluster.state.of_kind("worker")
        }
        yield _Watch(router, workers)


async def _one_policy(cluster: Cluster, requests: int) -> Run:
    now = cluster.state
    async with _watching(cluster) as watch, open_chat(now.gateway_url) as chat:
        for _ in now.of_kind("worker"):  # connections, first-time work: none of it is the policy's
            await chat.stream(now.model, "Hello!", max_tokens=2, temperature=0)
        await watch.reset()
        answers = []
        for _ in range(requests):
            answers.append(await _ask(chat, now.model))
            await watch.settled()
        return Run(tuple(w.name for w in now.of_kind("worker")), tuple(answers))


async def _ask(chat: ChatClient, model: str) -> ChatAnswer:
    answer = await chat.stream(model, PROMPT, max_tokens=_NEW_TOKENS, temperature=0)
    if answer.prompt_tokens < _LEAST_PROMPT_TOKENS:
        raise RequestFailed(
            f"the prompt has {answer.prompt_tokens} tokens with this model; "
            f"the demonstration needs {_LEAST_PROMPT_TOKENS}"
        )
    return answer


def _table(policy: str, run: Run) -> Table:
    split = ", ".join(f"{w} {n}" for w, n in run.to_json()["per_worker"].items())
    table = Table(title=f"{policy}: {split}", title_justify="left", title_style="bold", box=None)
    for column in ("#", "worker", "prompt", "predicted cached", "really cached", "TTFT"):
        table.add_column(column, justify="left" if column == "worker" else "right")
    for number, answer in enumerate(run.answers, 1):
        table.add_row(
            str(number),
            answer.worker,
            str(answer.prompt_tokens),
            str(answer.predicted_cached_tokens),
            str(answer.cached_tokens),
            f"{answer.ttft_s:.3f} s",
        )
    return table
