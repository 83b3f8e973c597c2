"""Host memory: arenas made within the budget, found again, and removed when nobody is left."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.common.arena import PAGE, Arena, ArenaError, Geometry, SlotHeader, SlotState
from services.common.settings import SettingsError
from services.kvbm.tiers.host import GeometryMismatch, HostTier
from services.kvbm.tiers.memory import Available, memory_available
from tests.support.polling import until

MIB = 1 << 20
GEOMETRY = Geometry(32, PAGE, 1, "test")
A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
SEALED = SlotHeader(SlotState.SEALED, 3, b"k" * 32, payload_bytes=PAGE, checksums=(1,))


def nobody(namespace: bytes) -> bool:
    return False


def everybody(namespace: bytes) -> bool:
    return True


def plenty(path: Path) -> Available:
    return Available(path, 1 << 50, 1 << 50)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[HostTier]:
    tier = HostTier(tmp_path, 8 * MIB, available=plenty)
    yield tier
    await tier.close()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


async def reopened(tmp_path: Path, budget: int = 8 * MIB) -> tuple[HostTier, list[Arena]]:
    tier = HostTier(tmp_path, budget, available=plenty)
    return tier, await tier.adopt()


# -- making ---------------------------------------------------------------------------------------


async def test_a_namespace_gets_what_its_share_holds(host: HostTier, tmp_path: Path) -> None:
    """L8: the budget is bytes of memory really taken, headers and all."""
    arena = await host.open(A, GEOMETRY, nobody)
    assert arena.slots == Arena.fitting(GEOMETRY, 8 * MIB)
    assert host.used_bytes == arena.path.stat().st_size <= 8 * MIB
    assert host.used_bytes > 8 * MIB - PAGE - 256
    assert await host.open(A, GEOMETRY, nobody) is arena
    assert [a.namespace for a in host.arenas] == [A]


async def test_huge_pages_are_whole_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L8, R1: what is rounded up to 2 MiB must not be too large for its own budget next time."""
    real = os.statvfs(tmp_path)
    values = {name: getattr(real, name) for name in dir(real) if name.startswith("f_")}
    huge = SimpleNamespace(**{**values, "f_bsize": 2 * MIB})
    for name in ("statvfs", "fstatvfs"):
        monkeypatch.setattr(os, name, lambda place: huge)
    tier = HostTier(tmp_path, 7 * MIB, available=plenty)
    assert (await tier.open(A, GEOMETRY, nobody)).length == 6 * MIB
    await tier.close()
    assert len((await reopened(tmp_path, 7 * MIB))[1]) == 1


async def test_shares_divide_the_budget(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, 8 * MIB, 0.4, available=plenty)
    sizes = [(await tier.open(n, GEOMETRY, everybody)).length / MIB for n in (A, B, C)]
    # The third gets what is left.
    assert sizes == pytest.approx([3.2, 3.2, 1.6], abs=0.01)
    with pytest.raises(
        ArenaError, match=r"no room in G2.* 8\.00 MiB .*are in use by 3 others"
    ) as caught:
        await tier.open(b"d" * 32, GEOMETRY, everybody)
    assert caught.value.errno == errno.ENOSPC
    assert "FOREBAY_KVBM_CPU_CACHE_GB" in str(caught.value)
    await tier.close()


async def test_a_block_larger_than_the_budget_is_refused(host: HostTier) -> None:
    with pytest.raises(ArenaError, match="one block takes"):
        await host.open(A, Geometry(32, 9 * MIB), nobody)


async def test_idle_arenas_make_room_least_recently_used_first(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, 8 * MIB, 0.5, available=plenty)
    retired: list[bytes] = []

    async def retire(namespace: bytes) -> None:
        # Still there: its users end first.
        assert (tmp_path / f"{namespace.hex()}.arena").exists()
        retired.append(namespace)

    await tier.open(A, GEOMETRY, nobody, retire)
    await tier.open(B, GEOMETRY, nobody, retire)
    await tier.open(A, GEOMETRY, nobody, retire)
    await tier.open(C, GEOMETRY, nobody, retire)
    assert retired == [B]
    assert {a.namespace for a in tier.arenas} == {A, C}
    await tier.open(B, GEOMETRY, lambda namespace: namespace == A, retire)
    assert retired == [B, C]
    assert len(names(tmp_path)) == 2
    await tier.close()


async def test_an_engine_s_mapping_outlives_removal(host: HostTier) -> None:
    """L7: unlinked, never truncated: a copy that runs writes into nothing that counts."""
    arena = await host.open(A, GEOMETRY, nobody)
    engine = Arena.open(arena.path)
    await host.remove(A)
    await host.remove(A)
    assert not arena.path.exists()
    assert arena.closed
    engine.payload(0)[:] = b"x" * PAGE
    engine.close()
    assert host.used_bytes == 0


async def test_another_geometry_is_refused_while_in_use_and_replaced_else(host: HostTier) -> None:
    """C7: one namespace, one geometry."""
    await host.open(A, GEOMETRY, nobody)
    other = replace(GEOMETRY, layout="another")
    with pytest.raises(GeometryMismatch, match="another"):
        await host.open(A, other, everybody)
    with capture_logs() as logs:
        assert (await host.open(A, other, nobody)).geometry == other
    assert any(line["event"] == "arena.unfit" for line in logs)


async def test_a_removed_file_is_made_anew_when_nobody_uses_it(host: HostTier) -> None:
    """Somebody cleans up /dev/shm: engines that come later must find a file."""
    arena = await host.open(A, GEOMETRY, nobody)
    arena.path.unlink()
    with pytest.raises(ArenaError, match="has removed"):
        await host.open(A, GEOMETRY, everybody)
    again = await host.open(A, GEOMETRY, nobody)
    assert again is not arena
    Arena.open(again.path).close()


async def test_what_memory_there_is_is_looked_at_first(tmp_path: Path) -> None:
    """tmpfs or memory too small: a clear refusal before a page is touched."""
    for room, number, why in (
        (
            Available(tmp_path, 3 * MIB, 1 << 50),
            errno.ENOSPC,
            r"file system of .* has 3\.00 MiB free",
        ),
        (
            Available(tmp_path, 1 << 50, 3 * MIB, "the box"),
            errno.ENOMEM,
            r"the box has 3\.00 MiB to spare",
        ),
    ):
        tier = HostTier(tmp_path, 8 * MIB, available=lambda path, room=room: room)
        with pytest.raises(ArenaError, match=why) as caught:
            await tier.open(A, GEOMETRY, nobody)
        assert caught.value.errno == number
        assert "FOREBAY_KVBM_CPU_CACHE_GB" in str(caught.value)
        assert names(tmp_path) == []
        await tier.close()


async def test_more_than_the_machine_has_is_refused_for_real(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, 1 << 50)
    with pytest.raises(ArenaError, match=r"1048576\.00 GiB of G2 don't fit"):
        await tier.open(A, Geometry(32, 64 * MIB), nobody)
    await tier.close()


async def test_memory_that_can_t_be_locked_is_used_and_said(
    host: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.backend == "mmap"
    monkeypatch.setattr(Arena, "lock_memory", lambda self: "not permitted")
    await host.open(A, GEOMETRY, nobody)
    assert host.backend.startswith("mmap(not locked: not permitted")
    await host.remove(A)
    monkeypatch.setattr(Arena, "lock_memory", lambda self: "")
    await host.open(A, GEOMETRY, nobody)
    assert host.backend == "mmap(locked)"


class Slow:
    """Creation that waits in its thread, and tells progress meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.times = 0
        create = Arena.create

        def slow(*args: Any) -> Arena:
            self.times += 1
            self.begun.set()
            while not self.go_on.wait(0.002):
                args[4](1, 2)
            return create(*args)

        monkeypatch.setattr(Arena, "create", slow)


async def test_a_caller_who_gives_up_finds_it_done_next_time(
    host: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2: an attach that runs into its deadline doesn't begin anew each time."""
    slow = Slow(monkeypatch)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await host.open(A, GEOMETRY, nobody)
    second = asyncio.create_task(host.open(A, GEOMETRY, nobody))
    await asyncio.to_thread(slow.begun.wait, 5)
    slow.go_on.set()
    assert (await second).namespace == A
    assert slow.times == 1


async def test_progress_is_logged(host: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """H2: big pools take a while, and say how far they are."""
    monkeypatch.setattr("services.kvbm.tiers.host._TELL_EVERY_S", 0.0)
    slow = Slow(monkeypatch)
    with capture_logs() as logs:
        task = asyncio.create_task(host.open(A, GEOMETRY, nobody))

        async def told() -> bool:
            return any(line["event"] == "arena.progress" for line in logs)

        await until(told, within_s=5)
        slow.go_on.set()
        await task
    assert next(line for line in logs if line["event"] == "arena.progress")["percent"] == 50


async def test_stopping_ends_what_is_being_made(
    host: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    task = asyncio.create_task(host.open(A, GEOMETRY, nobody))
    await asyncio.to_thread(slow.begun.wait, 5)
    await host.close()
    with pytest.raises(ArenaError, match="stopping"):
        await task


async def test_a_failure_nobody_waits_for_is_no_lost_exception(
    host: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    task = asyncio.create_task(host.open(A, Geometry(32, 9 * MIB), nobody))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    slow.go_on.set()
    await host.remove(A)


# -- finding again --------------------------------------------------------------------------------


async def test_a_new_daemon_finds_what_the_old_one_left(host: HostTier, tmp_path: Path) -> None:
    """L7, C12: adopted with every header and byte, whether the old one ended well or not."""
    arena = await host.open(A, GEOMETRY, nobody)
    arena.write_header(2, SEALED)
    arena.payload(2)[:] = b"y" * PAGE
    # Not closed: as after kill -9.
    tier, found = await reopened(tmp_path)
    assert [a.namespace for a in found] == [A]
    assert found[0].header(2) == SEALED
    assert bytes(found[0].payload(2)) == b"y" * PAGE
    assert tier.backend.startswith("mmap(")
    assert await tier.open(A, GEOMETRY, nobody) is found[0]
    await tier.close()
    await host.close()
    assert (await reopened(tmp_path))[1][0].header(2) == SEALED


async def test_what_is_no_good_arena_is_removed_and_said(host: HostTier, tmp_path: Path) -> None:
    """L7, C6: damaged, half made, of another version, misnamed: nothing of it stays."""
    good = (await host.open(A, GEOMETRY, nobody)).path
    whole = good.read_bytes()
    (tmp_path / f"{B.hex()}.making").write_bytes(whole)
    bad = {
        B: whole[:-PAGE],
        C: b"FBARENA0" + whole[8:],
        b"d" * 32: whole[:20] + b"!" + whole[21:],
        b"e" * 32: b"",
        b"f" * 32: whole,
    }
    for name, content in bad.items():
        (tmp_path / f"{name.hex()}.arena").write_bytes(content)
    (tmp_path / f"{b'g'.hex() * 32}.arena").symlink_to("/etc/passwd")
    (tmp_path / "keep.txt").touch()
    with capture_logs() as logs:
        tier, found = await reopened(tmp_path, 80 * MIB)
    assert [a.namespace for a in found] == [A]
    gone = [line for line in logs if line["event"] == "arena.discarded"]
    assert len(gone) == len(bad) + 1
    assert names(tmp_path) == sorted([good.name, "keep.txt", f"{b'g'.hex() * 32}.arena"])
    await tier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
async def test_somebody_else_s_arena_is_not_ours(host: HostTier, tmp_path: Path) -> None:
    path = (await host.open(A, GEOMETRY, nobody)).path
    os.chown(path, 12345, -1)
    tier, found = await reopened(tmp_path)
    assert found == []
    assert not path.exists()
    await tier.close()


async def test_a_smaller_budget_keeps_the_most_recently_used(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, 12 * MIB, 1 / 3, available=plenty)
    for age, namespace in enumerate((B, A, C)):
        path = (await tier.open(namespace, GEOMETRY, nobody)).path
        os.utime(path, (1000 + age, 1000 + age))
    await tier.close()
    tier, found = await reopened(tmp_path, 9 * MIB)
    assert [a.namespace for a in found] == [A, C]
    assert tier.used_bytes <= 9 * MIB
    await tier.close()


async def test_the_order_of_use_outlives_the_daemon(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, 8 * MIB, 0.5, available=plenty)
    for namespace in (A, B):
        os.utime((await tier.open(namespace, GEOMETRY, nobody)).path, (1000, 1000))
    await tier.open(A, GEOMETRY, nobody)
    await tier.close()
    tier, found = await reopened(tmp_path)
    assert [a.namespace for a in found] == [B, A]
    await tier.close()


async def test_purge_removes_everything(host: HostTier, tmp_path: Path) -> None:
    await host.open(A, GEOMETRY, nobody)
    (tmp_path / f"{B.hex()}.making").touch()
    assert await host.purge() == 2
    assert names(tmp_path) == []
    assert host.used_bytes == 0
    assert (await host.open(A, GEOMETRY, nobody)).slots


async def test_a_place_that_can_t_be_is_named_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tier = HostTier(tmp_path / "file", MIB, available=plenty)
    with pytest.raises(SettingsError, match="FOREBAY_KVBM_CPU_CACHE_DIR"):
        await tier.adopt()


# -- what the machine says ------------------------------------------------------------------------

GIB = 1 << 30
MEMINFO = "MemTotal:       20971520 kB\nMemFree:  1 kB\nMemAvailable:   10485760 kB\n"


def kernel(tmp_path: Path, files: dict[str, str]) -> Available:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_available(tmp_path, tmp_path / "proc", tmp_path / "cgroup")


def test_the_machine_s_memory_less_a_reserve(tmp_path: Path) -> None:
    found = kernel(tmp_path, {"proc/meminfo": MEMINFO})
    assert found.memory == 10 * GIB - GIB // 2
    assert found.file_system > 0


def test_the_narrowest_control_group_counts(tmp_path: Path) -> None:
    """Containers: an arena beyond the limit would have the daemon killed, not refused."""
    found = kernel(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pod/kvbm\n",
            "cgroup/pod/kvbm/memory.max": "max\n",
            "cgroup/pod/kvbm/memory.current": "1\n",
            "cgroup/pod/memory.max": f"{4 * GIB}\n",
            "cgroup/pod/memory.current": f"{2 * GIB}\n",
            "cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    assert found.memory == 3 * GIB - 4 * GIB // 20
    assert found.memory_is == "the memory limit 4.00 GiB"
    with pytest.raises(ArenaError, match=r"the memory limit 4\.00 GiB has 2\.80 GiB to spare"):
        found.check(3 * GIB)


def test_control_groups_of_the_first_version(tmp_path: Path) -> None:
    found = kernel(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "7:cpu:/x\n6:memory,foo:/docker/1\n",
            "cgroup/memory/docker/1/memory.limit_in_bytes": f"{2 * GIB}",
            "cgroup/memory/docker/1/memory.usage_in_bytes": f"{GIB}",
        },
    )
    assert found.memory == GIB - 2 * GIB // 20


def test_a_machine_that_says_nothing_limits_nothing(tmp_path: Path) -> None:
    found = kernel(tmp_path, {"proc/meminfo": ""})
    assert found.memory is None
    found.check(PAGE)
