"""`forebay demo disagg`: what long prompts do to other people's tokens, and what helps.

Eight chats decode all the time while long prompts come in. First both workers do everything, with
prefill chunks of several sizes; then one prefills and the other decodes, and KV moves between them.
The same requests each time, in float32, each worker on a core of its own.
"""

import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.adapters.http import ChatAnswer, ChatClient, metrics, open_chat
from services.cli.console import stderr
from services.cli.demo.disagg_picture import draw
from services.cli.demo.mixture import STREAMS, Mixture, chat, long_prompts, mixture
from services.cli.demo.sizes import block_bytes
from services.cli.errors import CliError, ModelError
from services.cli.model import Model
from services.cli.up.options import UpOptions
from services.cli.up.run import Cluster, StopRequests, run_cluster
from services.cli.up.view import LiveReporter, PlainReporter, Reporter

SHARE = 0.6
"""Of what the prefill worker could prefill, so much comes."""
BUDGETS = (128, 256, 512)
"""Prefill chunks (max_num_batched_tokens) of the aggregated runs; the best one counts."""
_LONG_ANSWER = 8
_ANSWER_S = 600.0
_SAMPLE_S = 0.5
_SETTLE_S = 3.0
_CALIBRATE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Moved:
    """One prompt's KV on its way from worker to worker."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Leg:
    """The load once."""

    name: str
    chats: tuple[ChatAnswer, ...]
    longs: tuple[ChatAnswer, ...]
    began_s: float
    """When the first long prompt was sent, by time.perf_counter()."""
    ended_s: float
    """When the last one had its first token."""
    moved: tuple[Moved, ...] = ()

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Of all chats: when a token came (seconds after the first long prompt), and how long
        after the one before; while long prompts were about.
        """
        return [
            (now - self.began_s, now - before)
            for answer in self.chats
            for before, now in pairwise(answer.arrivals_s)
            if self.began_s <= now <= self.ended_s
        ]

    @property
    def ttft_s(self) -> list[float]:
        """Of the long prompts."""
        return [answer.ttft_s for answer in self.longs]

    def itl_ms(self, share: float) -> float:
        """A quantile of the time between tokens, in milliseconds."""
        gaps = sorted(gap for _, gap in self.gaps)
        if not gaps:
            raise CliError("the chats ended before the long prompts came")
        return 1000 * gaps[min(len(gaps) - 1, int(share * len(gaps)))]

    def to_json(self) -> dict[str, float]:
        """The published form."""
        return {
            "itl_p50_ms": round(self.itl_ms(0.5), 1),
            "itl_p99_ms": round(self.itl_ms(0.99), 1),
            "itl_max_ms": round(self.itl_ms(1.0), 1),
            "ttft_p50_s": round(statistics.median(self.ttft_s), 3),
        }


@dataclass(frozen=True, slots=True)
class Result:
    """All runs; `aggregated` by size of prefill chunks."""

    load: Mixture
    prefill_s: float
    aggregated: dict[int, Leg]
    apart: Leg

    @property
    def best(self) -> int:
        """The chunk size whose aggregated run had the best p99 between tokens."""
        return min(self.aggregated, key=lambda size: self.aggregated[size].itl_ms(0.99))

    @property
    def tokens_equal(self) -> bool:
        """Whether every answer had the same tokens in all runs, chats as far as they came."""
        for leg in self.aggregated.values():
            for a, b in zip(leg.longs, self.apart.longs, strict=True):
                if not a.tokens or a.tokens != b.tokens:
                    return False
            for a, b in zip(leg.chats, self.apart.chats, strict=True):
                both = min(len(a.tokens), len(b.tokens))
                if not both or a.tokens[:both] != b.tokens[:both]:
                    return False
        return True

    def to_json(self) -> dict[str, Any]:
        """The published form."""
        moved = self.apart.moved
        seconds = sum(m.seconds for m in moved)
        return {
            "aggregated": {
                **self.aggregated[self.best].to_json(),
                "max_num_batched_tokens": self.best,
            },
            "aggregated_by_max_num_batched_tokens": {
                str(size): leg.to_json() for size, leg in self.aggregated.items()
            },
            "disaggregated": {
                **self.apart.to_json(),
                "transfers": len(moved),
                "transfer_gb_s": round(sum(m.bytes for m in moved) / seconds / 1e9, 2)
                if seconds
                else 0.0,
                "transfer_bytes": [m.bytes for m in moved],
                "transfer_s": [round(m.seconds, 4) for m in moved],
            },
            "tokens_equal": self.tokens_equal,
        }


def run_demo(
    model: Model,
    *,
    prompts: int,
    tokens: int,
    as_json: bool,
    output: Path,
    console: Console,
) -> Result:
    """Runs it, prints a table (or JSON alone) and draws `output`. Raises CliError when it can't.

    prompts: long prompts to send. tokens: length of each.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise CliError("the demonstration needs two processor cores, one for each worker")
    progress = stderr()
    reporter: Reporter = LiveReporter(progress) if progress.is_terminal else PlainReporter(progress)
    with tempfile.TemporaryDirectory(prefix="forebay-demo-") as folder:
        try:
            result = asyncio.run(
                _measure(model, Path(folder), prompts, tokens, cores[:2], reporter)
            )
        finally:
            reporter.close()
    draw(result, model.served_name, output)
    if as_json:
        console.file.write(json.dumps(result.to_json()) + "\n")
    else:
        _show(result, console)
        console.print(f"\nPicture: {output}")
    return result


async def _measure(
    model: Model,
    state_dir: Path,
    prompts: int,
    tokens: int,
    cores: Sequence[int],
    reporter: Reporter,
) -> Result:
    longs, block = await asyncio.to_thread(_prompts, Path(model.location), prompts + 1, tokens)
    room = 2 * (tokens + 512) + STREAMS * 1536
    options = UpOptions(
        state_dir=str(state_dir),
        model=model.location,
        served_model_name=model.served_name,
        workers=2,
        prefill=1,
        decode=1,
        kvbm=False,
        auto_ports=True,
        float32=True,
        kv_cache_gb=max(1.0, room / 32 * block / (1 << 30)),
        drain_timeout_s=5.0,
    )
    stop = StopRequests()
    stop.on_signals()
    plan: list[tuple[Mixture, float]] = []
    legs: dict[int, Leg] = {}

    async def apart(cluster: Cluster) -> None:
        async with _ready(cluster, cores) as client:
            reporter.note("measuring one long prompt, and the chats alone")
            prefill_s = await _prefill_s(cluster, client, longs[-1])
            itl_s = await _itl_s(cluster, client)
            load = mixture(longs[:-1], prefill_s, itl_s, SHARE)
            plan.append((load, prefill_s))
            reporter.note(f"apart: {_words(load)}")
            legs[0] = await _leg("apart", cluster, client, load)

    def together(size: int) -> Any:
        async def run(cluster: Cluster) -> None:
            async with _ready(cluster, cores) as client:
                reporter.note(f"together, prefill chunks of {size} tokens")
                legs[size] = await _leg(f"together, chunks of {size}", cluster, client, plan[0][0])

        return run

    await run_cluster(options, reporter, stop, apart)
    for size in BUDGETS:
        if stop.asked.is_set():
            break
        whole = replace(
            options,
            prefill=0,
            decode=0,
            engine_args=json.dumps({"max_num_batched_tokens": size}),
        )
        await run_cluster(whole, reporter, stop, together(size))
    if stop.asked.is_set():
        raise KeyboardInterrupt
    load, prefill_s = plan[0]
    return Result(load, prefill_s, {size: legs[size] for size in BUDGETS}, legs[0])


def _prompts(folder: Path, number: int, tokens: int) -> tuple[tuple[str, ...], int]:
    """Long prompts, and the bytes of a block in float32."""
    from services.gateway.adapters.tokenizer import Tokenizer

    try:
        block = block_bytes(json.loads((folder / "config.json").read_text()))
        tokenizer = Tokenizer.load(folder)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ModelError(f"the demonstration needs a model folder; {folder}: {exc!r}") from exc
    try:
        return long_prompts(number, tokens, lambda text: len(tokenizer.encode(text))), block
    finally:
        tokenizer.close()


@asynccontextmanager
async def _ready(cluster: Cluster, cores: Sequence[int]) -> AsyncIterator[ChatClient]:
    """A client, when the workers are pinned to a core each and have done their first work."""
    now = cluster.state
    workers = now.of_kind("worker")
    for worker, core in zip(workers, cores, strict=True):
        pin(worker.pid, core)
    async with open_chat(now.gateway_url, timeout_s=_ANSWER_S) as client:
        for worker in workers:
            await client.stream(
                now.model, "Hello!", worker=worker.name, max_tokens=4, temperature=0
            )
        yield client


def pin(pid: int, core: int) -> None:
    """Binds all threads of a process to one core; later ones inherit it."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(task.name), {core})


async def _prefill_s(cluster: Cluster, client: ChatClient, prompt: str) -> float:
    """Seconds that the prefill worker takes for a long prompt, alone."""
    now = cluster.state
    prefill = now.of_kind("worker")[0].name
    answer = await client.stream(now.model, prompt, worker=prefill, max_tokens=1, temperature=0)
    return answer.ttft_s


async def _itl_s(cluster: Cluster, client: ChatClient) -> float:
    """Seconds between tokens while all chats run on the decode worker, and nothing else."""
    now = cluster.state
    decode = now.of_kind("worker")[-1].name
    tasks = [_chat(client, now.model, n, _CALIBRATE_TOKENS, worker=decode) for n in range(STREAMS)]
    answers = await asyncio.gather(*tasks)
    gaps = [b - a for x in answers for a, b in pairwise(x.arrivals_s[_CALIBRATE_TOKENS // 4 :])]
    return statistics.median(gaps)


async def _chat(
    client: ChatClient,
    model: str,
    number: int,
    tokens: int,
    *,
    worker: str = "",
    enough: Callable[[], bool] = lambda: False,
) -> ChatAnswer:
    return await client.stream(
        model,
        chat(number),
        worker=worker,
        enough=enough,
        max_tokens=tokens,
        ignore_eos=True,
        temperature=0,
        logprobs=True,
    )


async def _leg(name: str, cluster: Cluster, client: ChatClient, load: Mixture) -> Leg:
    model = cluster.state.model
    moved: list[Moved] = []
    decode = cluster.state.of_kind("worker")[-1].ready.metrics_address
    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_watch_transfers(decode, moved))
        chats = [
            tasks.create_task(_chat(client, model, n, load.chat_tokens, enough=over.is_set))
            for n in range(STREAMS)
        ]
        # The chats' own prefills are over, and all decode.
        await asyncio.sleep(_SETTLE_S)
        began = time.perf_counter()
        longs = []
        for number, prompt in enumerate(load.longs):
            await asyncio.sleep(began + number * load.every_s - time.perf_counter())
            longs.append(tasks.create_task(_long(client, model, prompt)))
        long_answers = [await task for task in longs]
        over.set()
        chat_answers = [await task for task in chats]
        await asyncio.sleep(2 * _SAMPLE_S)
        watching.cancel()
    ended = max(answer.arrivals_s[0] for answer in long_answers)
    return Leg(name, tuple(chat_answers), tuple(long_answers), began, ended, tuple(moved))


async def _long(client: ChatClient, model: str, prompt: str) -> ChatAnswer:
    return await client.stream(
        model, prompt, max_tokens=_LONG_ANSWER, ignore_eos=True, temperature=0, logprobs=True
    )


async def _watch_transfers(address: str, moved: list[Moved]) -> None:
    """Notes each transfer that the decode worker took: they are seconds apart."""
    names = [f"forebay_worker_transfer_{part}" for part in ("bytes_total", "seconds_sum")]
    before: list[float] | None = None
    while True:
        seen = await metrics(address)
        now = [seen.get(name, 0.0) for name in names]
        if before is not None and now[0] > before[0]:
            moved.append(Moved(round(now[0] - before[0]), now[1] - before[1]))
        before = now
        await asyncio.sleep(_SAMPLE_S)


def _words(load: Mixture) -> str:
    return (
        f"{STREAMS} chats all the time, {len(load.longs)} long prompts, one every "
        f"{load.every_s:.1f} s"
    )


def _show(result: Result, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in ("between tokens p50", "p99", "max", "first token of long prompts p50"):
        table.add_column(column, justify="right")
    for size, leg in sorted(result.aggregated.items()):
        best = " (best)" if size == result.best else ""
        _row(table, f"together, chunks of {size}{best}", leg)
    _row(table, "apart", result.apart)
    console.print(table)
    whole, apart = result.aggregated[result.best], result.apart
    better = whole.itl_ms(0.99) / apart.itl_ms(0.99)
    longer = statistics.median(apart.ttft_s) / statistics.median(whole.ttft_s)
    console.print(
        f"\n{_words(result.load)} ({SHARE:.0%} of what one worker can prefill: "
        f"{result.prefill_s:.2f} s each)\n"
        f"apart: p99 between tokens {better:.1f}x better, first token of long prompts "
        f"{longer:.2f}x as late"
    )
    if result.apart.moved:
        console.print("KV moved: " + ", ".join(_moved(m) for m in result.apart.moved))
    if result.tokens_equal:
        console.print(Text("all answers equal, token for token", style="green"))
    else:
        console.print(Text("some answers differ: this must not be", style="bold red"))


def _row(table: Table, name: str, leg: Leg) -> None:
    table.add_row(
        name,
        *(f"{leg.itl_ms(share):.0f} ms" for share in (0.5, 0.99, 1.0)),
        f"{statistics.median(leg.ttft_s):.2f} s",
    )


def _moved(moved: Moved) -> str:
    return f"{moved.bytes / 1e6:.0f} MB in {1000 * moved.seconds:.0f} ms"
