"""One cluster from start to stop: its processes in their order, its state file, its readiness."""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.cli.adapters.http import is_ok
from services.cli.adapters.kvbm import NodeStats, open_kvbm
from services.cli.adapters.rpc import WorkerRow, open_router
from services.cli.errors import CliError, StartFailed
from services.cli.up import caches as blockcaches
from services.cli.up import down, state
from services.cli.up.options import UpOptions
from services.cli.up.plan import LOOPBACK, STOP_ORDER, etcd_spec, plan_ports, service_specs
from services.cli.up.ports import check_free
from services.cli.up.process import find
from services.cli.up.spec import ProcessSpec, ProcessState, ProcessView
from services.cli.up.state import ClusterState, Phase
from services.cli.up.supervisor import Supervisor, supervise
from services.cli.up.view import Reporter
from services.common.errors import ForebayError
from services.common.net import host_port

_KILL_AFTER_S = 5.0
"""Time beyond its own drain timeout that a process gets before SIGKILL."""
_WATCH_EVERY_S = 1.0
_LOOK_EVERY_S = 0.1
_NAMED = 5
"""Missing workers that are named; of more only the number is told."""


class StopRequests:
    """The wish to stop: first ask drains, the second kills. Owned by the loop's thread."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()

    def ask(self) -> None:
        """Asks once more."""
        (self.forced if self.asked.is_set() else self.asked).set()

    def on_signals(self) -> None:
        """Takes SIGINT and SIGTERM as asking."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self.ask)


class Cluster:
    """A running cluster; made by `run_cluster`, for what is done with it while it runs."""

    def __init__(self, options: UpOptions, supervisor: Supervisor, record: "_Record") -> None:
        self.options = options
        self.supervisor = supervisor
        self._record = record

    @property
    def state(self) -> ClusterState:
        """What cluster.json says now."""
        return self._record.state


class _Record:
    """Keeps cluster.json true, and the reporter told."""

    def __init__(
        self,
        options: UpOptions,
        gateway_url: str,
        etcd: str,
        caches: blockcaches.Caches | None,
        reporter: Reporter,
    ) -> None:
        self._dir = Path(options.state_dir)
        self._reporter = reporter
        me = find(os.getpid())
        assert me is not None
        self.state = ClusterState(
            phase=Phase.STARTING,
            supervisor=me,
            gateway_url=gateway_url,
            model=options.served_model_name,
            model_path=options.model,
            policy=options.policy,
            etcd_endpoints=etcd,
            own_etcd=not options.etcd,
            caches=caches,
            api_keys_file=options.api_keys_file,
            restart=options.restart,
            started_unix_s=time.time(),
        )
        self._views: dict[str, ProcessView] = {}
        state.save(self._dir, self.state)

    def change(self, view: ProcessView) -> None:
        """A process changed."""
        self._views[view.name] = view
        self.state = replace(self.state, processes=tuple(self._views.values()))
        state.save(self._dir, self.state)
        self._reporter.change(view)

    def phase(self, phase: Phase) -> None:
        """The cluster changed."""
        self.state = replace(self.state, phase=phase)
        state.save(self._dir, self.state)


async def run_cluster(
    options: UpOptions,
    reporter: Reporter,
    stop: StopRequests,
    serve: Callable[[Cluster], Awaitable[None]],
) -> None:
    """Starts a cluster, runs `serve` once it is ready, stops it when that returns or is asked to.

    Raises CliError when a port is taken or a process does not start; whatever happens, nothing is
    left running.
    """
    directory = Path(options.state_dir)
    with state.locked(directory):
        await asyncio.to_thread(down.sweep, directory, reporter.note)
        ports = plan_ports(options)
        if not options.auto_ports:
            check_free(ports.uses(options.host))
        if options.etcd:
            await _check_etcd(options.etcd)
        state.prepare(directory)
        caches = await asyncio.to_thread(_prepare_caches, options, reporter.note)
        shutil.rmtree(directory / "etcd", ignore_errors=True)  # only leases of dead processes
        reach = LOOPBACK if options.host in ("0.0.0.0", "::") else options.host
        record = _Record(
            options,
            gateway_url=f"http://{host_port(reach, ports.gateway)}",
            etcd=options.etcd or host_port(LOOPBACK, ports.etcd),
            caches=caches,
            reporter=reporter,
        )
        try:
            async with supervise(
                directory / "logs", restart=options.restart, on_change=record.change
            ) as supervisor:
                _revive_on_hangup(supervisor, reporter)
                try:
                    cluster = Cluster(options, supervisor, record)
                    own = None if options.etcd else etcd_spec(ports, directory)

                    async def live() -> None:
                        if own is not None:
                            supervisor.start(own)
                            await supervisor.wait_ready([own.name], 30.0)
                        specs = service_specs(options, ports, caches)
                        began = time.monotonic()
                        for spec in specs:
                            if spec.kind == "worker":
                                # Engines find their cache there from the first request on, and
                                # whoever forks them has imported what they need.
                                early = [*_of_kind(specs, "kvbm"), *_of_kind(specs, "forkserver")]
                                await supervisor.wait_ready(early, options.start_timeout_s)
                            supervisor.start(spec)
                        await supervisor.wait_ready(
                            [s.name for s in specs], options.start_timeout_s
                        )
                        left = options.start_timeout_s - (time.monotonic() - began)
                        await wait_serving(cluster, max(left, 5.0))
                        record.phase(Phase.READY)
                        async with asyncio.TaskGroup() as tasks:
                            watching = tasks.create_task(_watch(cluster, reporter))
                            await serve(cluster)
                            watching.cancel()

                    await _until(live(), stop.asked)
                except BaseException:
                    record.phase(Phase.FAILED)
                    await _stop(supervisor, options, stop)
                    raise
                record.phase(Phase.STOPPING)
                reporter.note("stopping: gateway, routers, workers, kvbm, etcd")
                await _stop(supervisor, options, stop)
        finally:
            if record.state.phase is not Phase.FAILED:
                record.phase(Phase.STOPPED)


def _prepare_caches(options: UpOptions, note: Callable[[str], None]) -> blockcaches.Caches | None:
    """The caches that fit, their folder made, and a word about what doesn't. Blocks."""
    blockcaches.sweep_orphans(note)
    plan = blockcaches.plan_caches(options)
    for text in plan.notes:
        note(text)
    if plan.caches is not None:
        try:
            blockcaches.mark(plan.caches, Path(options.state_dir))
        except OSError as exc:
            note(f"no block cache: {plan.caches.cpu_dir} can't be used ({exc.strerror})")
            return None
    return plan.caches


def _of_kind(specs: tuple[ProcessSpec, ...], kind: str) -> list[str]:
    return [s.name for s in specs if s.kind == kind]


async def wait_serving(cluster: Cluster, timeout_s: float) -> None:
    """Returns when every router has every running worker in choice and the gateway is ready."""
    waiting_for = ""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                if not (waiting_for := await _missing(cluster.state)):
                    return
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError:
        raise StartFailed(
            f"all processes are up, but after {timeout_s:g} s {waiting_for}",
            hint=f"Logs are in {Path(cluster.options.state_dir, 'logs')}",
        ) from None


async def _missing(now: ClusterState) -> str:
    """What is not there yet, for people; empty when the cluster serves."""
    wanted = {
        one
        for w in now.of_kind("worker")
        if w.state is ProcessState.READY
        for one in w.ready.instances or ((w.name, w.ready.incarnation),)
    }
    for router in now.of_kind("router"):
        try:
            async with open_router(router.ready.address) as client:
                listed = await client.list_workers()
        except ForebayError as exc:
            return f"{router.name} does not answer ({exc.message})"
        ready = {(w.holder.id, w.holder.incarnation) for w in listed.workers if w.state == "ready"}
        if lacking := wanted - ready:
            names = ", ".join(sorted(name for name, _ in lacking)[:_NAMED])
            more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
            return f"{router.name} does not see {names}{more}"
    if not await is_ok(f"{now.gateway_url}/ready"):
        return f"the gateway at {now.gateway_url} does not say that it is ready"
    return ""


async def _watch(cluster: Cluster, reporter: Reporter) -> None:
    """Tells the reporter each second how the workers and the kvbm do."""
    while True:
        reporter.workers(await worker_rows(cluster.state))
        if cluster.state.of_kind("kvbm"):
            caches = await cache_stats(cluster.state)
            reporter.tiers(None if caches is None else caches.tiers)
        await asyncio.sleep(_WATCH_EVERY_S)


async def worker_rows(now: ClusterState) -> tuple[WorkerRow, ...] | None:
    """The workers as the first router that answers sees them; None when none does."""
    for router in now.of_kind("router"):
        if router.state is not ProcessState.READY:
            continue
        with contextlib.suppress(ForebayError):
            async with open_router(router.ready.address) as client:
                return (await client.list_workers()).workers
    return None


async def cache_stats(now: ClusterState) -> NodeStats | None:
    """The figures of the cluster's kvbm; None when there is none, or it does not answer."""
    for view in now.of_kind("kvbm"):
        if view.state is not ProcessState.READY:
            continue
        with contextlib.suppress(ForebayError):
            async with open_kvbm(view.ready.address, timeout_s=2.0) as client:
                return await client.stats()
    return None


async def _check_etcd(endpoints: str) -> None:
    for endpoint in endpoints.split(","):
        host, _, port = endpoint.strip().rpartition(":")
        try:
            async with asyncio.timeout(3.0):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            continue
        except ValueError as exc:
            raise CliError(f"--etcd has {endpoint!r}, which is not host:port") from exc
        writer.close()
        return
    raise CliError(
        f"no etcd answers at {endpoints}",
        hint="Leave --etcd out to have one started, or name one that runs.",
    )


async def _until(work: Coroutine[Any, Any, None], event: asyncio.Event) -> None:
    """Runs `work` to its end, or until `event` is set: then it is cancelled and awaited."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        stopped_early = not task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if not stopped_early:
        task.result()


async def _stop(supervisor: Supervisor, options: UpOptions, stop: StopRequests) -> None:
    """Stops everything in order; a second wish to stop kills what is left."""

    async def force() -> None:
        await stop.forced.wait()
        supervisor.kill_all()

    async with asyncio.TaskGroup() as tasks:
        forcing = tasks.create_task(force())
        await supervisor.stop_kinds(STOP_ORDER, options.drain_timeout_s + _KILL_AFTER_S)
        forcing.cancel()


def _revive_on_hangup(supervisor: Supervisor, reporter: Reporter) -> None:
    """SIGHUP starts what is down: for those who run with --no-restart."""

    def revive() -> None:
        names = supervisor.start_what_is_down()
        reporter.note(f"starting again: {', '.join(names) or 'nothing is down'}")

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, revive)
