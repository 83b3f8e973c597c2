"""`forebay down`: stops a cluster by its state directory, with or without its supervisor."""

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from services.cli.errors import StateError
from services.cli.up import caches, state
from services.cli.up.plan import STOP_ORDER
from services.cli.up.process import ProcessRef, alive, end, send, wait_gone
from services.cli.up.state import ClusterState, Phase

_SWEEP_GRACE_S = 5.0


def _leftovers(found: ClusterState) -> list[tuple[str, str, ProcessRef]]:
    """Kind, name and life of each process that is still alive, in the order in which they stop."""
    refs = [(p.kind, p.name, ProcessRef(p.pid, p.start_time)) for p in found.processes if p.pid]
    order = {kind: i for i, kind in enumerate(STOP_ORDER)}
    return sorted((r for r in refs if alive(r[2])), key=lambda r: order.get(r[0], 0))


def sweep(state_dir: Path, note: Callable[[str], None]) -> int:
    """Ends processes that a dead supervisor left behind; returns their number.

    Never touches a process that merely got the pid of one of them, nor anything under a living
    supervisor.
    """
    found = state.load(state_dir)
    if found is None or found.supervised():
        return 0
    left = _leftovers(found)
    for _, name, ref in left:
        note(f"{name} (pid {ref.pid}) was left behind by an older cluster; stopping it")
        end(ref, _SWEEP_GRACE_S)
    return len(left)


def bring_down(
    state_dir: Path,
    note: Callable[[str], None],
    *,
    timeout_s: float = 90.0,
    force: bool = False,
    purge: bool = False,
) -> bool:
    """Stops the cluster of `state_dir`; False when there was nothing to stop.

    Asks the supervisor (SIGTERM: it drains and stops all in order) and waits at most `timeout_s`;
    `force`, or the end of that time, kills it, and the kernel its processes. Cached blocks stay for
    the next start, unless `purge`, which also removes those of a cluster that had stopped before.
    Raises StateError when something would not die.
    """
    found = state.load(state_dir)
    if found is None:
        return False
    supervisor = found.supervisor
    ran = send(supervisor, signal.SIGTERM)
    if ran:
        if force:
            send(supervisor, signal.SIGTERM)
        if not wait_gone(supervisor, 15.0 if force else timeout_s):
            note(f"the supervisor (pid {supervisor.pid}) did not stop in time; killing it")
            send(supervisor, signal.SIGKILL)
            wait_gone(supervisor, 5.0)
            _wait_for_kernel(found)
    swept = sweep(state_dir, note)
    left = [name for _, name, _ in _leftovers(state.load(state_dir) or found)]
    if left or alive(supervisor):
        raise StateError(f"could not stop {', '.join(left) or 'the supervisor'}")
    last = state.load(state_dir)
    if last is not None and last.phase not in (Phase.STOPPED, Phase.FAILED):
        state.save(state_dir, replace(last, phase=Phase.STOPPED))
    if purge and found.caches is not None:
        caches.purge(found.caches, note)
    return ran or swept > 0


def _wait_for_kernel(found: ClusterState) -> None:
    """Gives the kernel a moment to deliver the deaths that follow the supervisor's."""
    deadline = time.monotonic() + 2.0
    for _, _, ref in _leftovers(found):
        wait_gone(ref, max(0.0, deadline - time.monotonic()))
