"""Who lives: locks of engines in this process and in others, killed, stopped and forked."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.common.ownerlock import OwnerLock, OwnerLockError
from services.common.settings import SettingsError
from services.kvbm.owners import Owners, private_directory
from tests.support.polling import until

HOLD = """
import sys
from pathlib import Path
from services.common.ownerlock import OwnerLock
lock = OwnerLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def owners(tmp_path: Path, clock: Clock) -> Iterator[Owners]:
    made = Owners(tmp_path / "arenas", clock=clock)
    yield made
    made.close()


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def test_an_owner_lives_as_long_as_its_process(owners: Owners) -> None:
    """R2, R4: no pid and no deadline, the lock says it."""
    owner, path = owners.new()
    assert owner > 0
    assert not owners.locked(owner)
    assert not owners.dead(owner)
    with holder(path) as process:
        assert owners.locked(owner)
        assert not owners.dead(owner)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert not owners.dead(owner), "a stopped engine may still write once it goes on"
        process.kill()
        process.wait()
        assert owners.dead(owner)
        assert not owners.locked(owner)


def test_death_is_final(owners: Owners) -> None:
    owner, path = owners.new()
    OwnerLock(path).close()
    # Nobody looked while it was held: it may not have begun yet.
    assert not owners.dead(owner)
    with OwnerLock(path):
        assert owners.locked(owner)
    assert owners.dead(owner)
    # Its slots may be somebody else's by now.
    with OwnerLock(path):
        assert owners.dead(owner)
        assert not owners.locked(owner)


def test_who_never_locks_is_dead_after_a_grace(owners: Owners, clock: Clock) -> None:
    """L1: an engine that died between attaching and locking leaves nothing for ever."""
    owner, _ = owners.new()
    clock.now += 9.9
    assert not owners.dead(owner)
    clock.now += 0.2
    assert owners.dead(owner)


def test_forgetting_removes_the_file_and_unknown_ones_are_dead(
    owners: Owners, tmp_path: Path
) -> None:
    owner, path = owners.new()
    assert owners.known() == [owner]
    owners.forget(owner)
    owners.forget(owner)
    assert owners.known() == []
    assert not path.exists()
    assert owners.dead(owner)
    assert not owners.locked(owner)
    assert list((tmp_path / "arenas" / "owners").iterdir()) == []


def test_ids_are_random_and_not_reused(owners: Owners, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: and never 0, which is the daemon."""
    draws = iter([5, 5, 0, 6])
    monkeypatch.setattr("services.kvbm.owners.secrets.randbits", lambda bits: next(draws))
    assert [owners.new()[0], owners.new()[0]] == [5, 6]


def test_a_removed_file_kills_nobody(owners: Owners) -> None:
    """Whoever cleans up /dev/shm must not make a living engine's slots free."""
    owner, path = owners.new()
    with holder(path) as process:
        assert owners.locked(owner)
        path.unlink()
        assert owners.locked(owner)
        assert not owners.dead(owner)
        process.kill()
        process.wait()
        assert owners.dead(owner)


def test_the_next_daemon_takes_over(tmp_path: Path, clock: Clock) -> None:
    """L7, R1: after a kill -9 of the daemon, engines that live keep their slots; others don't."""
    first = Owners(tmp_path, clock=clock)
    (alive, path), (gone, other), (never, late) = first.new(), first.new(), first.new()
    with OwnerLock(path):
        with OwnerLock(other):
            first.locked(gone)
        (tmp_path / "owners" / "stray").touch()
        (tmp_path / "owners" / f"{7:016x}.lock").symlink_to("/dev/zero")
        first.close()
        second = Owners(tmp_path, clock=clock)
        assert sorted(second.known()) == sorted([alive, gone, never])
        assert second.locked(alive)
        assert not second.dead(alive)
        with OwnerLock(late):
            assert not second.locked(never), "too late: its slots were free at the start"
        # At once: who was granted anything had locked before.
        assert second.dead(gone)
        assert second.dead(never)
    assert second.dead(alive)
    second.close()


def test_a_second_daemon_is_refused_by_name_of_the_setting(tmp_path: Path) -> None:
    first = Owners(tmp_path)
    with pytest.raises(SettingsError, match=r"FOREBAY_KVBM_CPU_CACHE_DIR.*another kvbm daemon"):
        Owners(tmp_path)
    first.close()
    Owners(tmp_path).close()


def test_a_folder_that_others_could_write_to_is_refused(tmp_path: Path) -> None:
    """Whoever can put a file there can answer with bytes of his own."""
    for path, mode, uid, why in (
        (tmp_path / "open", 0o777, None, "every user"),
        (tmp_path / "theirs", 0o770, 12345, "belongs to user 12345"),
    ):
        path.mkdir()
        path.chmod(mode)
        if uid is not None:
            if os.geteuid():
                continue
            os.chown(path, uid, -1)
        with pytest.raises(SettingsError, match=f"FOREBAY_KVBM_CPU_CACHE_DIR=.*{why}"):
            private_directory(path)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name, why in (("link", "link"), ("file", "File exists"), ("file/x", "Not a directory")):
        with pytest.raises(SettingsError, match=why):
            private_directory(tmp_path / name)
    shared = tmp_path / "sticky"
    shared.mkdir()
    shared.chmod(0o1777)
    private_directory(shared)


# -- the engine's side ----------------------------------------------------------------------------


def test_a_lock_is_had_once_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with pytest.raises(OwnerLockError, match="can't open"):
        OwnerLock(path)
    path.touch()
    first = OwnerLock(path)
    assert first.held
    with pytest.raises(OwnerLockError, match="another process"):
        OwnerLock(path, wait_s=0.01)
    first.close()
    first.close()
    assert not first.held
    OwnerLock(path).close()


def test_it_waits_while_the_daemon_looks(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.touch()
    looking = OwnerLock(path)
    timer = threading.Timer(0.05, looking.close)
    timer.start()
    with OwnerLock(path, wait_s=10) as lock:
        assert lock.held
    timer.join()


def test_a_file_that_the_daemon_gave_up_is_no_lock(
    owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1: locked too late, between the daemon's look and its removal of the file."""
    owner, path = owners.new()
    opened = os.open

    def late(*args: object, **more: object) -> int:
        fd = opened(*args, **more)  # type: ignore[arg-type]
        monkeypatch.setattr(os, "open", opened)
        owners.forget(owner)
        return fd

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(OwnerLockError, match="given it up"):
        OwnerLock(path)


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_children_do_not_keep_the_lock(owners: Owners, how: str) -> None:
    """L7: an engine's orphans must not make it look alive for ever."""
    owner, path = owners.new()
    lock = OwnerLock(path)
    assert owners.locked(owner)
    read, write = os.pipe()
    if how == "fork":
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    else:
        child = os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", "import os, sys; os.read(int(sys.argv[1]), 1)", str(read)],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, read, read)],
        )
    try:
        # The parent's own is untouched by what the child does.
        assert owners.locked(owner)
        lock.close()

        async def dead() -> bool:
            return owners.dead(owner)

        # The child may be on its way yet.
        asyncio.run(until(dead, within_s=5, what="death"))
    finally:
        os.close(write)
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
