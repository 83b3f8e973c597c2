"""A read from a process that is stopped, given up in two ways."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from benchmarks.transfer.source import SHOWN, Source
from benchmarks.transfer.target import Target, new_agent
from services.common.telemetry.logging import setup_logging
from services.worker.connector.transfer.agents import PeerAgents
from services.worker.connector.transfer.peer import LOCAL

Late = tuple[float, int, bool]
"""Seconds from giving up until that is done, bytes written after it, whether the source lives."""
ENOUGH_S = 20.0
"""Longer than any of these steps takes; one that is not done then has failed."""


def fenced(deadline_s: float) -> Late:
    """By the connector: seconds from the deadline until it says so, late bytes, source alive."""
    setup_logging("benchmark", level="error")
    with Source() as source, Target() as target:
        agents = PeerAgents(new_agent(), new_agent, deadline_s)
        try:
            agents.register_memory(agents.get_reg_descs([(*target.memory, "")], "DRAM"))
            name = agents.add_remote_agent(source.metadata)
            local = agents.prep_xfer_dlist(LOCAL, agents.get_xfer_descs([target.memory], "DRAM"))
            shown = agents.get_xfer_descs([(source.address, SHOWN, 0)], "DRAM")
            remote = agents.prep_xfer_dlist(name, shown)

            def read() -> str:
                transfer = agents.make_prepped_xfer("READ", local, [0], remote, [0], b"")  # type: ignore[arg-type]
                agents.transfer(transfer)
                return _until(lambda: agents.check_xfer_state(transfer), {"DONE", "ERR"})

            _expect("DONE", read())
            source.signal(signal.SIGSTOP)
            began = time.monotonic()
            _expect("ERR", read())
            seconds = time.monotonic() - began - deadline_s
            agents.remove_remote_agent(name)
            late, alive = _go_on(source, target)
        finally:
            agents.close()
    return seconds, late, alive


def released() -> Late:
    """By releasing the handle alone: as `fenced`."""
    with Source() as source, Target() as target:
        agent = new_agent()
        agent.register_memory(agent.get_reg_descs([(*target.memory, "")], "DRAM"))
        name = agent.add_remote_agent(source.metadata)
        mine = agent.get_xfer_descs([target.memory], "DRAM")
        theirs = agent.get_xfer_descs([(source.address, SHOWN, 0)], "DRAM")

        def begun() -> Any:
            handle = agent.initialize_xfer("READ", mine, theirs, name)
            agent.transfer(handle)
            return handle

        first = begun()
        _expect("DONE", _until(lambda: agent.check_xfer_state(first), {"DONE", "ERR"}))
        agent.release_xfer_handle(first)
        source.signal(signal.SIGSTOP)
        handle = begun()
        began = time.monotonic()
        agent.release_xfer_handle(handle)
        seconds = time.monotonic() - began
        late, alive = _go_on(source, target, agent.get_new_notifs)
    return seconds, late, alive


def _go_on(
    source: Source, target: Target, drive: Callable[[], object] = lambda: None
) -> tuple[int, bool]:
    """Gives the memory other bytes, lets the source go on; bytes that changed, source alive."""
    target.reuse()
    source.signal(signal.SIGCONT)
    alive = source.answers_elsewhere(drive)
    return target.changed(), alive


def _until(state: Callable[[], str], ends: set[str]) -> str:
    until_s = time.monotonic() + ENOUGH_S
    while (found := state()) not in ends:
        if time.monotonic() > until_s:
            raise RuntimeError(f"a read is {found} for ever")
        time.sleep(0.0002)
    return found


def _expect(wanted: str, found: str) -> None:
    if found != wanted:
        raise RuntimeError(f"a read ended as {found}, not {wanted}")
