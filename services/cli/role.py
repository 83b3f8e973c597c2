"""`forebay role`: a worker's routing label, changed while it runs."""

import asyncio
from pathlib import Path

from services.cli.adapters.rpc import open_worker
from services.cli.errors import StateError, UsageError
from services.cli.up import state
from services.common.cards import Role


def change(state_dir: Path, worker: str, role: str) -> str:
    """Changes it; returns what to tell. Raises CliError, or what the worker answers."""
    try:
        wanted = Role(role)
    except ValueError as exc:
        names = ", ".join(Role)
        raise UsageError(f"the role is {role!r}; it must be one of {names}") from exc
    found = state.load(state_dir)
    workers = {p.name: p for p in found.of_kind("worker")} if found is not None else {}
    if worker not in workers:
        known = f"it has {', '.join(sorted(workers))}" if workers else "it has none"
        raise StateError(f"the cluster in {state_dir} has no worker {worker!r}; {known}")
    before = asyncio.run(_set(workers[worker].ready.address, wanted))
    return f"{worker}: {before} -> {wanted}" if before is not wanted else f"{worker}: {wanted}"


async def _set(address: str, role: Role) -> Role:
    async with open_worker(address) as client:
        return await client.set_role(role)
