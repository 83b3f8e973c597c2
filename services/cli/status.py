"""`forebay status`: what runs, how the workers do, where to ask. Looks, and believes no record."""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from services.cli.adapters.http import etcd_healthy, is_ok
from services.cli.adapters.kvbm import NodeStats
from services.cli.adapters.rpc import WorkerRow, is_serving
from services.cli.errors import StateError
from services.cli.kvview import tier_table
from services.cli.up import state
from services.cli.up.process import ProcessRef, alive
from services.cli.up.run import cache_stats, worker_rows
from services.cli.up.spec import ProcessState, ProcessView
from services.cli.up.state import ClusterState, Phase
from services.cli.up.view import process_table, worker_table
from services.common.forking import answers

_REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Status:
    """A cluster as it was found."""

    cluster: ClusterState
    """As recorded, its processes corrected by what was seen."""
    supervised: bool
    serving: dict[str, bool]
    """By process name: whether it answered that it serves."""
    workers: tuple[WorkerRow, ...] | None
    """As a router sees them; None when no router answers."""
    caches: NodeStats | None = None
    """Figures of the kvbm; None without one, or when it does not answer."""

    @property
    def ok(self) -> bool:
        """Whether everything runs and serves."""
        return (
            self.supervised
            and self.cluster.phase is Phase.READY
            and bool(self.serving)
            and all(self.serving.values())
            and self.workers is not None
            and all(w.state == "ready" for w in self.workers)
        )


async def look(state_dir: Path) -> Status:
    """Finds out how the cluster of `state_dir` does. Raises StateError when there is none."""
    found = state.load(state_dir)
    if found is None:
        raise StateError(
            f"no cluster in {state_dir}",
            hint="Start one with `forebay up`, or name its folder with --state-dir.",
        )
    seen = tuple(_correct(p) for p in found.processes)
    now = replace(found, processes=seen)
    answers = await asyncio.gather(*(_serves(p, now) for p in seen))
    return Status(
        cluster=now,
        supervised=now.supervised(),
        serving=dict(zip((p.name for p in seen), answers, strict=True)),
        workers=await worker_rows(now),
        caches=await cache_stats(now),
    )


def _correct(view: ProcessView) -> ProcessView:
    """A process that is recorded as running and is not, is down."""
    if not view.pid or alive(ProcessRef(view.pid, view.start_time)):
        return view
    return replace(view, pid=0, state=ProcessState.DOWN, detail="not running")


async def _serves(view: ProcessView, now: ClusterState) -> bool:
    if view.state is not ProcessState.READY:
        return False
    if view.kind == "etcd":
        return await etcd_healthy(view.ready.address)
    if view.kind == "forkserver":
        return await asyncio.to_thread(answers, Path(view.ready.address))
    if view.kind == "gateway":
        return await is_ok(f"{now.gateway_url}/ready")
    return await is_serving(view.ready.address)


def as_json(status: Status) -> dict[str, Any]:
    """The form for programs."""
    return {
        "ok": status.ok,
        "phase": status.cluster.phase,
        "supervised": status.supervised,
        "gateway_url": status.cluster.gateway_url,
        "model": status.cluster.model,
        "policy": status.cluster.policy,
        "etcd_endpoints": status.cluster.etcd_endpoints,
        "processes": [
            {**msgspec.to_builtins(p), "serving": status.serving[p.name]}
            for p in status.cluster.processes
        ],
        "workers": None
        if status.workers is None
        else [{**msgspec.to_builtins(w), "hit_rate": w.hit_rate} for w in status.workers],
        "kvbm": None if status.caches is None else msgspec.to_builtins(status.caches),
    }


def render(status: Status) -> RenderableType:
    """The form for people."""
    now = status.cluster
    views = tuple(
        replace(p, detail=p.detail or "running, but not serving")
        if p.state is ProcessState.READY and not status.serving[p.name]
        else p
        for p in now.processes
    )
    head = Text.assemble(
        (now.phase.value, "green" if status.ok else "red"),
        f"  {now.model} at {now.gateway_url}/v1\n",
        (f"policy {now.policy}, etcd {now.etcd_endpoints}", "dim"),
    )
    parts: list[RenderableType] = [head]
    if not status.supervised and now.phase not in (Phase.STOPPED, Phase.FAILED):
        parts.append(Text("its supervisor is gone", style="red"))
    parts += [Text(), process_table(views), Text()]
    if status.workers:
        parts.append(worker_table(status.workers))
    elif any(p.pid for p in views):
        parts.append(Text("no router answers" if status.workers is None else "no workers"))
    if status.caches is not None:
        parts += [Text(), tier_table(status.caches.tiers)]
    return Group(*parts)


def show(state_dir: Path, *, in_json: bool, watch: bool, console: Console) -> bool:
    """Prints the status (again each second with `watch`); whether all is well (at the end)."""
    status = asyncio.run(look(state_dir))
    if in_json:
        console.print_json(json.dumps(as_json(status)))
        return status.ok
    if not watch:
        console.print(render(status))
        return status.ok
    live = Live(render(status), console=console, auto_refresh=False)
    with live, contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(_REFRESH_S)
            status = asyncio.run(look(state_dir))
            live.update(render(status), refresh=True)
    return status.ok
