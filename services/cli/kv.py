"""`forebay kv`: what a node's block daemon holds and why, and how to keep or forget it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import RenderableType

from services.cli import config, kvview
from services.cli.console import stderr, stdout
from services.cli.errors import StateError, UsageError

if TYPE_CHECKING:  # gRPC takes a while to import, and other commands don't need it
    from services.cli.adapters.kvbm import Cleared, KvbmClient, Scrubbed

app = typer.Typer(
    help="The node's block caches below the engines: list, explain, pin, clear, verify.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
T = TypeVar("T")
_PIPE_WIDTH = 240
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class TierName(StrEnum):
    """Tiers that a daemon keeps."""

    G2 = "g2"
    G3 = "g3"
    G4 = "g4"


StateDir = Annotated[Path, typer.Option("--state-dir", help="State directory of the cluster.")]
Address = Annotated[
    str,
    typer.Option("--address", help="The daemon's host:port or unix:path, instead of a cluster's."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Namespace = Annotated[
    str,
    typer.Option("--namespace", help="Only this namespace: its hex, or enough of its beginning."),
]
Tenant = Annotated[str, typer.Option("--tenant", help="Only this tenant's blocks.")]
Tiers = Annotated[
    list[TierName], typer.Option("--tier", help="Only this tier; may be given several times.")
]
Owner = Annotated[str, typer.Option("--owner", help="In whose name.")]
Default = config.DEFAULT_STATE_DIR


def daemon_address(state_dir: Path, address: str) -> str:
    """Where the daemon answers: as told, or as the cluster's state says. Raises StateError."""
    from services.cli.up import state

    if address:
        return address
    found = state.load(state_dir.absolute())
    for view in found.of_kind("kvbm") if found else ():
        if view.pid and view.ready.address:
            return view.ready.address
    raise StateError(
        f"no kvbm runs in {state_dir}",
        hint="Start one with `forebay up`, or name a daemon with --address host:port.",
    )


def _ask(
    state_dir: Path, address: str, question: Callable[[KvbmClient], Awaitable[T]], timeout_s: float
) -> T:
    from services.cli.adapters.kvbm import open_kvbm

    async def run() -> T:
        async with open_kvbm(daemon_address(state_dir, address), timeout_s=timeout_s) as client:
            return await question(client)

    return asyncio.run(run())


async def find_namespace(client: KvbmClient, text: str) -> bytes:
    """The 32 bytes that `text` means: hex, or the beginning of the hex of one that is known.

    Empty text is no namespace. Raises UsageError.
    """
    if not text:
        return b""
    wanted = text.lower()
    if re.fullmatch(r"[0-9a-f]{64}", wanted):
        return bytes.fromhex(wanted)
    known = [n.namespace for n in (await client.stats()).namespaces]
    found = [n for n in known if n.startswith(wanted)]
    if len(found) == 1:
        return bytes.fromhex(found[0])
    listed = ", ".join(n[:12] for n in known) or "none"
    problem = "no namespace begins" if not found else f"{len(found)} namespaces begin"
    raise UsageError(f"{problem} with {text!r}; known: {listed}")


async def the_namespace(client: KvbmClient, text: str) -> bytes:
    """As `find_namespace`; without text the only one there is. Raises UsageError."""
    if text:
        return await find_namespace(client, text)
    known = [n.namespace for n in (await client.stats()).namespaces]
    if len(known) == 1:
        return bytes.fromhex(known[0])
    listed = ", ".join(n[:12] for n in known) or "none"
    raise UsageError(f"say which namespace with --namespace; known: {listed}")


def parse_key(text: str) -> bytes:
    """A block hash from hex. Raises UsageError."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise UsageError(f"{text!r} is no block hash; it must be 64 hex digits (see kv ls --full)")
    return bytes.fromhex(text)


def parse_duration(text: str) -> float:
    """Seconds from "90", "90s", "15m", "2h" or "7d". Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    seconds = float(found[1]) * _UNITS[found[2] or "s"] if found else 0.0
    if seconds <= 0:
        raise UsageError(f"{text!r} is no duration; such as 90s, 15m, 2h or 7d")
    return seconds


def emit(value: object, *, as_json: bool, view: Callable[[], RenderableType]) -> None:
    """Prints a result: for programs, or for people."""
    console = stdout()
    if as_json:
        console.print_json(json.dumps(value if isinstance(value, dict) else plain(value)))
    else:
        if not console.is_terminal:  # nothing is cut off for want of columns in a file or a pipe
            console.width = max(console.width, _PIPE_WIDTH)
        console.print(view())


def plain(value: object) -> Any:
    """Dataclasses as JSON's types."""
    return msgspec.to_builtins(value)


@app.command()
def stats(state_dir: StateDir = Default, address: Address = "", as_json: AsJson = False) -> None:
    """Occupancy by tier, namespaces, tenants, rates, counters."""
    found = _ask(state_dir, address, lambda client: client.stats(), 10.0)
    emit(found, as_json=as_json, view=lambda: kvview.stats_view(found))


@app.command("ls")
def ls(
    state_dir: StateDir = Default,
    address: Address = "",
    namespace: Namespace = "",
    tenant: Tenant = "",
    limit: Annotated[int, typer.Option(min=1, help="Most blocks to list.")] = 30,
    full: Annotated[bool, typer.Option("--full", help="Hashes in full.")] = False,
    as_json: AsJson = False,
) -> None:
    """Blocks, most recently used first."""

    async def question(client: KvbmClient) -> Any:
        wanted = await find_namespace(client, namespace)
        return await client.list_blocks(namespace=wanted, tenant=tenant, limit=limit)

    found = _ask(state_dir, address, question, 30.0)
    emit(found, as_json=as_json, view=lambda: kvview.blocks_view(found, full=full))


@app.command()
def clear(
    state_dir: StateDir = Default,
    address: Address = "",
    namespace: Namespace = "",
    tenant: Tenant = "",
    prefix: Annotated[
        str, typer.Option(help="Only the block with this hash, and all that follow it.")
    ] = "",
    tier: Tiers = [],  # noqa: B006 - typer reads it once
    everything: Annotated[
        bool, typer.Option("--everything", help="All blocks of all namespaces and tenants.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forgets blocks by namespace, tenant or prefix: counts first, then asks.

    Requests that use them finish unharmed.
    """
    if not (namespace or tenant or prefix or everything):
        raise UsageError("say what: --namespace, --tenant, --prefix, or --everything")
    if everything and (namespace or tenant or prefix):
        raise UsageError("--everything leaves nothing to select; give it alone or with --tier")
    key = parse_key(prefix) if prefix else b""

    async def question(client: KvbmClient) -> Any:
        wanted = await find_namespace(client, namespace)

        async def run(dry: bool) -> Cleared:
            return await client.clear(
                namespace=wanted,
                tenant=tenant,
                prefix=key,
                tiers=[t.value for t in tier],
                everything=everything,
                dry_run=dry,
            )

        counted = await run(True)
        if dry_run or not (yes or _agreed(counted)):
            return counted, False
        return await run(False), True

    result, done = _ask(state_dir, address, question, 60.0)
    emit(
        {"cleared": done, **plain(result)},
        as_json=as_json,
        view=lambda: kvview.cleared_view(result, done=done),
    )
    if not done and not dry_run:
        raise typer.Exit(1)


def _agreed(counted: Cleared) -> bool:
    """Whether the person at the terminal wants that much forgotten. Raises UsageError off one."""
    stderr().print(kvview.cleared_view(counted, done=False))
    if not sys.stdin.isatty():
        raise UsageError("nobody is here to ask; give --yes to go on, or --dry-run to only count")
    return typer.confirm("Forget these blocks?", err=True)


@app.command()
def unpin(
    key: Annotated[str, typer.Argument(help="Hash of the pinned prefix's last block.")] = "",
    state_dir: StateDir = Default,
    address: Address = "",
    namespace: Namespace = "",
    owner: Owner = "cli",
    all_pins: Annotated[bool, typer.Option("--all", help="All pins of the owner.")] = False,
    as_json: AsJson = False,
) -> None:
    """Undoes pins."""
    if bool(key) == all_pins:
        raise UsageError("give a block's hash, or --all")
    wanted = parse_key(key) if key else b""

    async def question(client: KvbmClient) -> int:
        where = await find_namespace(client, namespace)
        return await client.unpin(owner, namespace=where, key=wanted)

    pins = _ask(state_dir, address, question, 10.0)
    emit({"pins": pins}, as_json=as_json, view=lambda: f"{pins} pins undone")


@app.command()
def scrub(
    state_dir: StateDir = Default,
    address: Address = "",
    namespace: Namespace = "",
    tier: Tiers = [],  # noqa: B006 - typer reads it once
    as_json: AsJson = False,
) -> None:
    """Verifies the bytes of stored blocks now. Exits with 1 when some were bad (and are gone)."""

    async def question(client: KvbmClient) -> Scrubbed:
        wanted = await find_namespace(client, namespace)
        from services.cli.adapters.kvbm import Scrubbed

        last = Scrubbed(0, 0, 0, False)
        with kvview.scrub_progress(stderr()) as show:
            async for last in client.scrub(namespace=wanted, tiers=[t.value for t in tier]):
                show(last)
        return last

    found = _ask(state_dir, address, question, 60.0)
    emit(found, as_json=as_json, view=lambda: kvview.scrubbed_view(found))
    if found.corrupt or not found.done:
        raise typer.Exit(1)
