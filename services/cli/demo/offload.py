"""`forebay demo offload`: what happens to KV blocks when the engine's own memory is too small.

Several people with long documents come back at a set rate. The engine's cache (G1) holds two of
the documents, host memory (G2) three, the disk (G3) all. First with kvbm, then the same visits
without; in float32, so that the answers can be compared token for token.
"""

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.adapters.http import ChatAnswer, ChatClient, metrics, open_chat
from services.cli.adapters.kvbm import KvbmClient, open_kvbm
from services.cli.adapters.rpc import open_worker
from services.cli.console import stderr
from services.cli.demo.offload_picture import draw
from services.cli.demo.samples import Sample, sample_of
from services.cli.demo.sizes import sizes_for
from services.cli.demo.visits import Visit, calibration_prompt, fitting_qps, plan_visits
from services.cli.errors import CliError, RequestFailed
from services.cli.model import Model
from services.cli.up import caches, state
from services.cli.up.options import UpOptions
from services.cli.up.plan import Ports, service_specs
from services.cli.up.run import Cluster, StopRequests, run_cluster, wait_serving
from services.cli.up.view import LiveReporter, PlainReporter, Reporter
from services.common.errors import FailedPrecondition

_NEW_TOKENS = 8
_SAMPLE_S = 0.25
_RESTART_S = 90.0
_SETTLE_S = 5.0
_ANSWER_S = 300.0


@dataclass(frozen=True, slots=True)
class Leg:
    """The visits once: answers in their order, and what was seen of the caches meanwhile."""

    answers: tuple[ChatAnswer, ...]
    samples: tuple[Sample, ...] = ()

    @property
    def ttft_s(self) -> list[float]:
        """Time to first token of each visit."""
        return [a.ttft_s for a in self.answers]


@dataclass(frozen=True, slots=True)
class Result:
    """Both legs. `qps`: visits a second."""

    visits: tuple[Visit, ...]
    on: Leg
    off: Leg
    block_size: int
    qps: float

    @property
    def tokens_equal(self) -> bool:
        """Whether every answer had the same tokens with and without kvbm."""
        return all(
            a.tokens and a.tokens == b.tokens
            for a, b in zip(self.on.answers, self.off.answers, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """The published form."""
        last = self.on.samples[-1]
        return {
            "offload_g1_g2_blocks": last.offload_g1_g2,
            "offload_g2_g3_blocks": last.offload_g2_g3,
            "onboard_g2_g1_blocks": last.onboard_g2_g1,
            "onboard_g3_g1_blocks": last.onboard_g3_g1,
            "ttft_p50_s": {
                "off": round(statistics.median(self.off.ttft_s), 4),
                "on": round(statistics.median(self.on.ttft_s), 4),
            },
            "tokens_equal": self.tokens_equal,
        }


def run_demo(
    model: Model,
    *,
    users: int,
    visits_each: int,
    qps: float | None,
    as_json: bool,
    output: Path,
    console: Console,
) -> Result:
    """Runs it, prints a table (or JSON alone) and draws `output`. Raises CliError when it can't.

    qps: visits a second; None: as many as this machine's engine can serve without a cache.
    """
    progress = stderr()
    reporter: Reporter = LiveReporter(progress) if progress.is_terminal else PlainReporter(progress)
    with tempfile.TemporaryDirectory(prefix="forebay-demo-") as folder:
        try:
            result = asyncio.run(_measure(model, Path(folder), users, visits_each, qps, reporter))
        finally:
            reporter.close()
            found = state.load(Path(folder))
            if found is not None and found.caches is not None:
                caches.purge(found.caches, lambda text: None)
    draw(result.on.samples, result.visits, result.on.ttft_s, result.off.ttft_s, result.block_size,
         model.served_name, output)  # fmt: skip
    if as_json:
        console.file.write(json.dumps(result.to_json()) + "\n")
    else:
        _show(result, console)
        console.print(f"\nPicture: {output}")
    return result


async def _measure(
    model: Model,
    state_dir: Path,
    users: int,
    visits_each: int,
    qps: float | None,
    reporter: Reporter,
) -> Result:
    documents = [v.prompt for v in plan_visits(users, visits_each, 1.0)] + [calibration_prompt()]
    sizes = sizes_for(Path(model.location), documents)
    options = UpOptions(
        state_dir=str(state_dir),
        model=model.location,
        served_model_name=model.served_name,
        workers=1,
        auto_ports=True,
        float32=True,
        kv_cache_gb=sizes.gib(sizes.g1_blocks),
        max_model_len=sizes.max_model_len,
        cpu_cache_gb=sizes.gib(sizes.g2_blocks),
        disk_cache_gb=sizes.gib(sizes.g3_blocks),
        disk_cache_dir=str(state_dir / "kvbm"),
        drain_timeout_s=5.0,
    )
    stop = StopRequests()
    stop.on_signals()
    results: list[Result] = []

    async def serve(cluster: Cluster) -> None:
        if cluster.state.caches is None:
            raise CliError("this machine has no room for the demonstration's caches")
        async with open_kvbm(cluster.state.of_kind("kvbm")[0].ready.address) as kvbm:
            rate = qps or fitting_qps(await _compute_s(cluster, kvbm))
            visits = plan_visits(users, visits_each, rate)
            reporter.note(f"{len(visits)} visits with kvbm, {rate:.2f} a second")
            on = await _leg(cluster, visits, kvbm)
            (space, *_) = (await kvbm.stats()).namespaces
        await _without_kvbm(cluster, options)
        reporter.note(f"{len(visits)} visits without")
        off = await _leg(cluster, visits, None)
        results.append(Result(tuple(visits), on, off, space.block_size_tokens, rate))

    await run_cluster(options, reporter, stop, serve)
    if stop.asked.is_set():
        raise KeyboardInterrupt
    return results[0]


async def _compute_s(cluster: Cluster, kvbm: KvbmClient) -> float:
    """Seconds to the first token of a prompt that nobody has; afterwards all caches are empty."""
    now = cluster.state
    async with open_chat(now.gateway_url, timeout_s=_ANSWER_S) as chat:
        await chat.stream(now.model, "Hello!", max_tokens=2, temperature=0)  # first-time work
        answer = await chat.stream(now.model, calibration_prompt(), max_tokens=2, temperature=0)
    (worker,) = now.of_kind("worker")
    async with open_worker(worker.ready.address) as client, asyncio.timeout(_SETTLE_S):
        while True:
            with contextlib.suppress(FailedPrecondition):  # the request is just ending
                await client.reset_cache()
                break
            await asyncio.sleep(_SAMPLE_S)
    await kvbm.clear(everything=True)
    return answer.ttft_s


async def _without_kvbm(cluster: Cluster, options: UpOptions) -> None:
    """A new worker that knows no kvbm in the place of the old one."""
    ports = Ports(0, 0, (), ((0, 0, 0),), int(cluster.state.etcd_endpoints.rpartition(":")[2]), 0)
    worker = next(s for s in service_specs(options, ports) if s.kind == "worker")
    await cluster.supervisor.stop([worker.name], 10.0)
    cluster.supervisor.start(worker)
    await cluster.supervisor.wait_ready([worker.name], _RESTART_S)
    await wait_serving(cluster, _RESTART_S)


async def _leg(cluster: Cluster, visits: Sequence[Visit], kvbm: KvbmClient | None) -> Leg:
    now = cluster.state
    async with AsyncExitStack() as stack:
        chat = await stack.enter_async_context(open_chat(now.gateway_url, timeout_s=_ANSWER_S))
        await chat.stream(now.model, "Hello!", max_tokens=2, temperature=0)  # first-time work
        began = time.monotonic()
        samples: list[Sample] = []
        async with asyncio.TaskGroup() as tasks:
            sampling = None
            if kvbm is not None:
                sampling = tasks.create_task(_sample(cluster, kvbm, began, samples))
            answers = await _visit_all(chat, now.model, visits, began)
            if kvbm is not None and sampling is not None:
                await _settle(samples)
                sampling.cancel()
    return Leg(tuple(answers), tuple(s.since(samples[0]) for s in samples))


async def _visit_all(
    chat: ChatClient, model: str, visits: Sequence[Visit], began: float
) -> list[ChatAnswer]:
    """Sends every visit at its time, whether or not earlier ones are done."""

    async def one(visit: Visit) -> ChatAnswer:
        await asyncio.sleep(began + visit.at_s - time.monotonic())
        return await chat.stream(
            model, visit.prompt, max_tokens=_NEW_TOKENS, temperature=0, logprobs=True
        )

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(visit)) for visit in visits]
    return [task.result() for task in running]


async def _sample(cluster: Cluster, kvbm: KvbmClient, began: float, samples: list[Sample]) -> None:
    (worker,) = cluster.state.of_kind("worker")
    while True:
        seen = await metrics(worker.ready.metrics_address)
        stats = await kvbm.stats()
        samples.append(sample_of(time.monotonic() - began, seen, stats))
        await asyncio.sleep(_SAMPLE_S)


async def _settle(samples: Sequence[Sample]) -> None:
    """Waits until what goes down by itself has gone: no counter moved for a second."""
    deadline = time.monotonic() + _SETTLE_S
    wanted = max(2, round(1.0 / _SAMPLE_S))
    while time.monotonic() < deadline:
        await asyncio.sleep(_SAMPLE_S)
        last = samples[-wanted:]
        if len(last) == wanted and len({s.moved for s in last}) == 1:
            return


def _show(result: Result, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("time to first token", "without kvbm", "with kvbm", ""):
        table.add_column(column, justify="left" if column.startswith("time") else "right")
    rows: list[tuple[str, list[float], list[float]]] = [
        ("all visits, median", result.off.ttft_s, result.on.ttft_s),
        *(
            (words, _of(result, result.off, first), _of(result, result.on, first))
            for words, first in (("first visits, median", True), ("returns, median", False))
        ),
    ]
    for words, off, on in rows:
        a, b = statistics.median(off), statistics.median(on)
        table.add_row(words, f"{a:.3f} s", f"{b:.3f} s", f"{b / a:.2f}x")
    cached = [_cached_share(leg) for leg in (result.off, result.on)]
    table.add_row("prompt tokens not computed", *(f"{share:.0%}" for share in cached), "")
    console.print(table)
    told = result.to_json()
    console.print(
        f"\n{len(result.visits)} visits, {result.qps:.2f} a second; blocks of "
        f"{result.block_size} tokens: G1->G2 {told['offload_g1_g2_blocks']}, "
        f"G2->G3 {told['offload_g2_g3_blocks']}; brought back from G2 "
        f"{told['onboard_g2_g1_blocks']}, from G3 {told['onboard_g3_g1_blocks']}"
    )
    if result.tokens_equal:
        console.print(Text("all answers equal, token for token", style="green"))
    else:
        console.print(Text("some answers differ: this must not be", style="bold red"))


def _of(result: Result, leg: Leg, first: bool) -> list[float]:
    return [
        a.ttft_s
        for visit, a in zip(result.visits, leg.answers, strict=True)
        if (visit.number == 0) is first
    ]


def _cached_share(leg: Leg) -> float:
    prompt = sum(a.prompt_tokens for a in leg.answers)
    if not prompt:
        raise RequestFailed("the gateway told no token counts")
    return sum(a.cached_tokens for a in leg.answers) / prompt
