"""`forebay bench`: options in, one call into what does the work."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.console import stderr, stdout
from services.cli.errors import UsageError

app = typer.Typer(
    help="Measurements that need no cluster and no GPU.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_PIPE_WIDTH = 160
_POLICIES = "kv,round-robin,least-loaded,dynamo,lmetric"


@app.callback()
def _bench() -> None:
    """Measurements that need no cluster and no GPU."""


@app.command("router")
def bench_router(
    trace: Annotated[
        list[Path],
        typer.Option("--trace", help="Trace file: Mooncake's JSON lines or Azure's CSV."),
    ],
    more: Annotated[
        list[Path] | None, typer.Argument(help="More trace files.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers.", min=1)] = 8,
    capacity_blocks: Annotated[
        int, typer.Option(help="Blocks of 512 tokens that each worker's cache holds.", min=1)
    ] = 2000,
    policy: Annotated[
        str,
        typer.Option(
            help="Policies: kv, round-robin, random, least-loaded, p2c, sticky, dynamo (or "
            "dynamo:WEIGHT), lmetric; grid: all placements of the reference."
        ),
    ] = _POLICIES,
    replicas: Annotated[
        int, typer.Option(help="Routers that don't talk to each other.", min=1)
    ] = 1,
    event_lag: Annotated[
        float, typer.Option(help="How late routers hear of workers, in seconds.", min=0)
    ] = 0.0,
    drop: Annotated[
        float, typer.Option(help="Share of workers' envelopes that are lost.", min=0, max=0.9)
    ] = 0.0,
    slow_worker: Annotated[
        float, typer.Option(help="Speed of the first worker beside the others.", min=0.01)
    ] = 1.0,
    speedup: Annotated[float, typer.Option(help="Load: arrivals so much faster.", min=0.01)] = 1.0,
    think_time: Annotated[
        bool, typer.Option("--think-time", help="Turns of a conversation wait for the answer.")
    ] = False,
    jitter: Annotated[
        float, typer.Option(help="Spread arrivals by up to so many seconds.", min=0)
    ] = 0.0,
    model: Annotated[
        str, typer.Option(help="Worker model: simple, or engine (the simulator's).")
    ] = "simple",
    profile: Annotated[
        str, typer.Option(help="Timing profile of the engine model: GPU/MODEL.")
    ] = "h100/llama-3.1-8b",
    host_blocks: Annotated[
        int,
        typer.Option(help="Blocks of host memory below each worker (engine model).", min=0),
    ] = 0,
    limit: Annotated[int, typer.Option(help="Only so many first requests; 0: all.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of all that is left to chance.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "--png", help="File for the picture (PNG).")
    ] = None,
) -> None:
    """Replays traces through the router's own core over modelled workers, in simulated time.

    The picture goes to forebay-router.png unless --json is given; --output names another file.
    """
    from services.cli.bench.run import BenchOptions, ModelKind, parse_policies, run_bench
    from services.cli.bench.view import follow, table

    try:
        kind = ModelKind(model)
    except ValueError:
        raise UsageError(f"--model is simple or engine, not {model!r}") from None
    options = BenchOptions(
        traces=(*trace, *(more or ())),
        policies=parse_policies(policy),
        workers=workers,
        capacity_blocks=capacity_blocks,
        replicas=replicas,
        event_lag_s=event_lag,
        drop=drop,
        slow_worker=slow_worker,
        speedup=speedup,
        think_time=think_time,
        jitter_s=jitter,
        model=kind,
        profile=profile,
        host_blocks=host_blocks,
        seed=seed,
        limit=limit,
    )
    with follow(stderr()) as on_progress:
        rows = list(run_bench(options, on_progress))
    if as_json:
        typer.echo(json.dumps([_plain(asdict(row)) for row in rows], indent=1))
    else:
        console = stdout()
        if not console.is_terminal:
            console.width = _PIPE_WIDTH
        console.print(table(rows))
    picture = output or (None if as_json else Path("forebay-router.png"))
    if picture is not None:
        from services.cli.bench.picture import draw

        draw(rows, picture)
        stderr().print(f"picture: {picture}", markup=False)


def _plain(value: Any) -> Any:
    """Figures with as many digits as mean something."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value
