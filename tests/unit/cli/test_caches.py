"""Where `up` puts a cluster's block caches, what fits, and what a purge may remove."""

import os
from pathlib import Path

import msgspec
import pytest

from services.cli.errors import UsageError
from services.cli.up import caches as blockcaches
from services.cli.up.caches import Caches, arena_dir, plan_caches, purge, socket_path, sweep_orphans
from services.cli.up.options import UpOptions
from services.cli.up.state import ClusterState


def options(state_dir: Path | str = "/state", **changes: object) -> UpOptions:
    base = {"state_dir": str(state_dir), "model": "/models/m", "served_model_name": "m"}
    return UpOptions(**{**base, **changes})  # type: ignore[arg-type]


def plan(
    given: UpOptions, memory_gb: float = 100, disk_gb: float = 100, **environ: str
) -> blockcaches.CachePlan:
    return plan_caches(
        given,
        environ=environ,
        memory_room=lambda folder: memory_gb,
        disk_room=lambda folder: disk_gb,
    )


def caches(given: UpOptions, **more: object) -> Caches:
    found = plan(given, **more).caches  # type: ignore[arg-type]
    assert found is not None
    return found


def test_defaults_are_small_and_named_after_the_state_directory() -> None:
    found = caches(options())
    assert (found.cpu_gb, found.disk_gb) == (0.5, 1.0)
    assert found.cpu_dir == str(arena_dir(Path("/state"))) and found.own_cpu_dir
    assert found.disk_dir == "/state/kvbm" and found.own_disk_dir
    assert found.socket == "/state/run/kvbm-0.sock"
    assert caches(options("/other")).cpu_dir != found.cpu_dir
    assert caches(options()).cpu_dir == found.cpu_dir  # the next start finds its blocks again
    assert plan(options(kvbm=False)).caches is None


def test_options_win_over_variables_and_those_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[kvbm]\ncpu_cache_gb = 2\ndisk_cache_gb = 3\ndisk_cache_dir = "/toml"\n')
    environ = {"FOREBAY_KVBM_DISK_CACHE_GB": "5", "FOREBAY_KVBM_CPU_CACHE_DIR": "/huge"}
    found = caches(options(config=str(file), disk_cache_dir="/opt-disk"), **environ)
    assert (found.cpu_gb, found.disk_gb) == (2.0, 5.0)
    assert (found.cpu_dir, found.disk_dir) == ("/huge", "/opt-disk")
    assert not found.own_cpu_dir and not found.own_disk_dir
    assert caches(options(), FOREBAY_CONFIG=str(file)).disk_dir == "/toml"
    found = caches(options(cpu_cache_gb=1.0, disk_cache_gb=0.0), **environ)
    assert (found.cpu_gb, found.disk_gb, found.disk_dir) == (1.0, 0.0, "")
    with pytest.raises(UsageError, match="FOREBAY_KVBM_CPU_CACHE_GB is 'much'"):
        plan(options(), FOREBAY_KVBM_CPU_CACHE_GB="much")


def test_a_small_machine_gets_less_and_is_told() -> None:
    """Never fails: 64 MiB of /dev/shm, as containers have, is a small G2; none is no kvbm."""
    found = plan(options(cpu_cache_gb=8.0), memory_gb=0.0625, disk_gb=0.5)
    assert found.caches is not None
    assert (found.caches.cpu_gb, found.caches.disk_gb) == (0.0625, 0.5)
    assert "0.06 GiB instead of 8" in found.notes[0]
    assert "0.50 GiB instead of 1" in found.notes[1]
    found = plan(options(), memory_gb=1.0)  # nobody asked for a size: a quarter of the room
    assert found.caches is not None and found.caches.cpu_gb == 0.25 and found.notes == ()
    found = plan(options(), memory_gb=0.01)
    assert found.caches is None and "kvbm is not started" in found.notes[0]
    found = plan(options(), disk_gb=-0.5)
    assert found.caches is not None and found.caches.disk_gb == 0.0
    assert "no disk cache" in found.notes[0]
    assert plan(options()).notes == ()


def test_room_counts_what_older_blocks_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockcaches, "_free_bytes", lambda folder: 4 << 30)
    assert blockcaches.disk_room_gb(tmp_path / "absent") == pytest.approx(3.0)
    with (tmp_path / "blocks").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 << 20)
    assert blockcaches.disk_room_gb(tmp_path) == pytest.approx(3.0625, abs=0.001)
    monkeypatch.setattr(blockcaches, "available_memory_bytes", lambda: 1 << 30)
    assert blockcaches.memory_room_gb(tmp_path) == pytest.approx(0.5625, abs=0.001)
    monkeypatch.setattr(blockcaches, "available_memory_bytes", lambda: None)
    assert blockcaches.memory_room_gb(tmp_path) == pytest.approx(3.6625, abs=0.001)


def test_free_room_is_asked_of_the_real_machine(tmp_path: Path) -> None:
    assert blockcaches.memory_room_gb(tmp_path / "absent") > 0
    available = blockcaches.available_memory_bytes()
    assert available is not None and available > 0


def test_a_long_state_directory_has_its_socket_elsewhere(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    path = socket_path(long, "kvbm-0")
    assert long not in path.parents and len(os.fsencode(path)) <= 100
    assert path != socket_path(long / "other", "kvbm-0")


def test_purge_removes_what_we_chose_and_nothing_else(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        (folder / "blocks").write_text("x")
    told: list[str] = []
    purge(
        Caches(
            socket="", cpu_gb=1, cpu_dir=str(ours), disk_gb=1, disk_dir=str(theirs),
            own_disk_dir=False,
        ),
        told.append,
    )  # fmt: skip
    assert not ours.exists()
    assert (theirs / "blocks").exists() and "stays" in told[1]


def test_arenas_of_vanished_clusters_are_swept(tmp_path: Path) -> None:
    """L7: a state directory that is gone leaves no memory taken for ever."""
    me = os.getuid()
    alive, gone = tmp_path / "alive", tmp_path / "gone"
    alive.mkdir()
    shm = tmp_path / "shm"
    for name, owner in (("a", alive), ("b", gone)):
        folder = shm / f"forebay-{me}-{name}"
        folder.mkdir(parents=True)
        blockcaches.mark(Caches(socket="", cpu_gb=1, cpu_dir=str(folder)), owner)
    (shm / f"forebay-{me}-nobody-knows").mkdir()
    (shm / f"forebay-{me + 1}-b").mkdir()
    told: list[str] = []
    assert sweep_orphans(told.append, shm) == 1
    assert sorted(p.name for p in shm.iterdir()) == [
        f"forebay-{me}-a",
        f"forebay-{me}-nobody-knows",
        f"forebay-{me + 1}-b",
    ]
    assert "forebay" in told[0]


def test_a_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "planted"
    folder.mkdir()
    monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="somebody else"):
        blockcaches.mark(Caches(socket="", cpu_gb=1, cpu_dir=str(folder)), tmp_path)


def test_the_state_file_remembers_them(tmp_path: Path) -> None:
    found = caches(options())
    text = msgspec.json.encode({"caches": found})
    assert msgspec.json.decode(text, type=dict[str, Caches])["caches"] == found
    assert "caches" in ClusterState.__dataclass_fields__
