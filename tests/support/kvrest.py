"""What a kvbm cluster must look like when nothing runs: nothing held, nothing left behind."""

from __future__ import annotations

import re
from pathlib import Path

from services.kvbm.caretaker import SCRUBBER
from services.kvbm.core.model import DAEMON
from tests.support.client import WorkerClient
from tests.support.kvcluster import KvCluster
from tests.support.kvdamage import arena_records
from tests.support.polling import until

GRANT_BLOCKS = 64
"""Most slots that one engine holds, as in the daemon's settings."""
_SEGMENT = re.compile(r"segment-\d{4}\.(data|headers)")


async def nothing_is_left(kv: KvCluster) -> None:
    """No lease, slot, file or shared-memory entry but those of live engines; every block whole."""
    live = [n for n, p in kv.cluster.processes.items() if n.startswith("worker-") and p.alive]
    for name in live:
        async with WorkerClient(kv.cluster.ready(name).address) as worker:

            async def load(worker: WorkerClient = worker) -> tuple[int, int]:
                snapshot = await worker.snapshot()
                return await worker.requests(), snapshot.load.used_blocks

            await until(load, lambda n: n == (0, 0), within_s=20, what=f"an idle {name}")
    await kv.attached()
    await kv.at_rest()

    async def engines() -> list[str]:
        return sorted(w for n in (await kv.stats()).namespaces for w in n.workers)

    await until(engines, lambda w: w == sorted(live), within_s=20, what="just the live engines")
    granted = sum(n.granted for n in (await kv.stats()).namespaces)
    # One more, at times: that into which the scrubber reads.
    assert granted <= GRANT_BLOCKS * len(live) + 1, "slots were leaked"
    scanned, corrupt = await kv.scrub()
    assert corrupt == 0, f"{corrupt} of {scanned} blocks"
    locks = {p.stem for p in (kv.arena_dir / "owners").iterdir()}
    assert len(locks) == len(live), "lock files of dead engines"
    # Saves may go on; those who fill slots must be alive.
    with arena_records(kv.arenas[0]) as records:
        owners = {f"{owner:016x}" for owner in records.owners() - {DAEMON, SCRUBBER}}
        assert owners <= locks, "slots are being filled by nobody"
    check_files(kv)


def check_files(kv: KvCluster) -> None:
    """Every file in the daemon's folders is one that belongs there."""
    names = {p.name for p in kv.arena_dir.iterdir()}
    assert names == {"daemon.lock", "readers.lock", "owners", *(p.name for p in kv.arenas)}
    space = kv.disk_dir / kv.namespace.hex()
    assert {p.name for p in kv.disk_dir.iterdir()} <= {"lock", space.name}
    if space.exists():
        strange = [p.name for p in space.iterdir() if not _SEGMENT.fullmatch(p.name)]
        assert strange == ["space.json"], strange


def shared_memory(ours: Path) -> set[str]:
    """Entries of /dev/shm but those of the cluster itself."""
    return {p.name for p in Path("/dev/shm").iterdir() if p != ours}


def abandoned(entries: set[str]) -> set[str]:
    """Those that are still there and that no process has open or mapped."""
    there = {name for name in entries if Path("/dev/shm", name).exists()}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = (process / "maps").read_text()
            held += "\n".join(str(fd.readlink()) for fd in (process / "fd").iterdir())
        except OSError:
            continue  # it has ended
        there = {name for name in there if f"/dev/shm/{name}" not in held}
    return there


def anonymous_bytes(pid: int) -> int:
    """Memory that is the process's own: without files and shared memory that it maps."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("a process without memory")
