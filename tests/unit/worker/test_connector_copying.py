"""The copying thread: each job ends once, loads go first, reads wait for the forward pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.common.arena import Arena, Geometry
from services.worker.connector.copying import CopyThread
from services.worker.connector.model import (
    Attachment,
    Loaded,
    LoadItem,
    LoadOrder,
    Orders,
    Report,
    Saved,
    SaveOrder,
    Slot,
)
from services.worker.connector.worker_side import WorkerSide

NAMESPACE = bytes(range(32))
GEOMETRY = Geometry(32, 4096, 1, "test")


class FakeCopier:
    """Notes what it is asked for; `bad` and `broken` name blocks."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.bad: set[int] = set()
        self.broken: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.forward_done = threading.Event()
        self.forward_done.set()
        self.verify = True

    def fence(self) -> threading.Event:
        self.log.append(f"fence on {threading.current_thread().name}")
        return self.forward_done

    def save(self, blocks: Sequence[int], slots: Sequence[int], after: Any) -> list[int]:
        assert after.wait(10)
        self.gate.wait(10)
        self.log.append(f"save {len(blocks)}")
        if self.broken & set(blocks):
            raise OSError("can't copy")
        return [block + 1000 for block in blocks]

    def load(self, items: Sequence[LoadItem], after: Any) -> list[bool]:
        assert after.wait(10)
        self.gate.wait(10)
        self.log.append(f"load {len(items)}")
        if self.broken & {i.block for i in items}:
            raise OSError("can't copy")
        return [i.block not in self.bad for i in items]


class Rig:
    def __init__(self, folder: Path) -> None:
        self.arena = Arena.create(folder / "arena", NAMESPACE, GEOMETRY, 16)
        self.copier = FakeCopier()
        self.made = 0
        self.copies = CopyThread(self.make, NAMESPACE, GEOMETRY.shard_bytes, rest=0.0)
        self.side = WorkerSide(self.copies)
        self.folder = folder
        self.finished: list[str] = []
        self.invalid: set[int] = set()
        self.reports: list[Report] = []

    def make(self, arena: Arena, verify: bool) -> FakeCopier:
        self.made += 1
        self.copier.verify = verify
        return self.copier

    def attachment(self, owner: int = 1, arena: str = "arena") -> Attachment:
        lock = self.folder / f"owner-{owner}"
        lock.touch()
        return Attachment(owner, str(lock), str(self.folder / arena))

    def take(self) -> None:
        ends = self.side.take()
        self.finished += ends.finished
        self.invalid |= ends.invalid
        if ends.report:
            self.reports.append(ends.report)

    def until(self, probe: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 10
        while not probe():
            assert time.monotonic() < deadline
            time.sleep(0.001)
            self.take()

    def attach(self, **more: Any) -> str:
        attachment = self.attachment(**more)
        self.side.begin(Orders(attachment))
        said: list[str] = []

        def answered() -> bool:
            said.extend(
                r.attached[attachment.owner] for r in self.reports if attachment.owner in r.attached
            )
            return bool(said)

        self.until(answered)
        return said[0]

    def saved(self, job: int) -> Saved | None:
        return next((r.saved[job] for r in self.reports if job in r.saved), None)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.copier.gate.set()
    made.copier.forward_done.set()
    made.side.stop()


def order(request: str, blocks: Sequence[int]) -> LoadOrder:
    items = tuple(LoadItem(b, Slot(b, 1), bytes(32), (1,)) for b in blocks)
    return LoadOrder(request, tuple(blocks), items)


def test_a_load_is_told_with_the_blocks_that_it_did_not_fill(rig: Rig) -> None:
    """C1: the first bad block and all after it."""
    assert rig.attach() == ""
    rig.copier.bad = {12}
    rig.side.begin(Orders(loads=(order("good", [1, 2]), order("bad", [11, 12, 13]))))
    rig.until(lambda: len(rig.finished) == 2)
    assert rig.invalid == {12, 13}
    results = {k: v for r in rig.reports for k, v in r.loaded.items()}
    assert results["good"].good == 2
    assert (results["bad"].good, results["bad"].bad) == (1, (1,))


def test_a_load_that_breaks_or_has_no_arena_is_a_failed_load(rig: Rig) -> None:
    """C15, H4: never silence, never success."""
    rig.side.begin(Orders(loads=(order("early", [1, 2]),)))
    rig.until(lambda: rig.finished == ["early"])
    assert rig.invalid == {1, 2}
    rig.attach()
    rig.copier.broken = {5}
    rig.side.begin(Orders(loads=(order("broken", [5, 6]), LoadOrder("none", (8, 9), ()))))
    rig.until(lambda: len(rig.finished) == 3)
    assert rig.invalid == {1, 2, 5, 6, 8, 9}
    assert all(not v.bad for r in rig.reports for v in r.loaded.values()), "no bytes were bad"


def test_nothing_is_read_before_the_forward_pass_is_over(rig: Rig) -> None:
    """C2: the mark is set on the engine's thread, when the pass is given to the device."""
    rig.attach()
    rig.copier.forward_done.clear()
    rig.side.after_forward(Orders(saves=(SaveOrder(1, (1, 2), (1, 2)),)))
    assert rig.copier.log == [f"fence on {threading.current_thread().name}"]
    rig.take()
    assert rig.saved(1) is None
    rig.copier.forward_done.set()
    rig.until(lambda: rig.saved(1))
    assert rig.copier.log[-1] == "save 2"


def test_loads_go_before_saves_that_wait(rig: Rig) -> None:
    """P3: saves go in pieces."""
    rig.attach()
    rig.copier.gate.clear()
    rig.side.after_forward(Orders(saves=(SaveOrder(1, tuple(range(20)), tuple(range(20))),)))
    rig.side.begin(Orders(loads=(order("urgent", [30]),)))
    rig.copier.gate.set()
    rig.until(lambda: rig.saved(1) and rig.finished)
    work = [entry for entry in rig.copier.log if not entry.startswith("fence")]
    assert work.index("load 1") <= 1
    assert [w for w in work if w != "load 1"] == ["save 8", "save 8", "save 4"]
    saved = rig.saved(1)
    assert saved is not None
    assert saved.checksums == tuple(b + 1000 for b in range(20))


def test_a_copy_that_breaks_leaves_no_checksum(rig: Rig) -> None:
    rig.attach()
    rig.copier.broken = {9}
    blocks = tuple(range(16))
    rig.side.after_forward(Orders(saves=(SaveOrder(3, blocks, blocks),)))
    rig.until(lambda: rig.saved(3))
    saved = rig.saved(3)
    assert saved is not None
    assert saved.checksums == (*(b + 1000 for b in range(8)), *[None] * 8)


def test_a_step_beside_a_failed_load_saves_nothing(rig: Rig) -> None:
    """FACTS: what was computed in that step may have been made from garbage."""
    rig.attach()
    rig.copier.bad = {1}
    rig.side.begin(Orders(loads=(order("bad", [1]),)))
    deadline = time.monotonic() + 10
    while not rig.copies.failed_loads:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    rig.side.after_forward(Orders(saves=(SaveOrder(1, (5,), (5,)),)))
    rig.take()
    saved = rig.saved(1)
    assert saved is not None
    assert saved.checksums == (None,)
    rig.side.after_forward(Orders(saves=(SaveOrder(2, (5,), (5,)),)))
    rig.until(lambda: rig.saved(2))
    saved = rig.saved(2)
    assert saved is not None
    assert saved.checksums == (1005,)


def test_the_same_arena_is_mapped_once_and_the_lock_is_the_new_owner_s(rig: Rig) -> None:
    assert rig.attach(owner=1) == ""
    assert rig.attach(owner=2) == ""
    assert rig.made == 1
    Arena.create(rig.folder / "other", NAMESPACE, GEOMETRY, 16).close()
    assert rig.attach(owner=3, arena="other") == ""
    assert rig.made == 2


def test_an_arena_of_another_namespace_is_refused(rig: Rig) -> None:
    """I5, C7"""
    Arena.create(rig.folder / "foreign", bytes(32), GEOMETRY, 4).close()
    assert "namespace" in rig.attach(arena="foreign")
    other = Geometry(32, 8192, 1, "test")
    Arena.create(rig.folder / "larger", NAMESPACE, other, 4).close()
    assert "geometry" in rig.attach(owner=2, arena="larger")
    assert "Error" in rig.attach(owner=3, arena="missing")
    rig.side.begin(Orders(loads=(order("r", [1]),)))
    rig.until(lambda: rig.finished == ["r"])
    assert rig.invalid == {1}


def test_results_are_told_once(rig: Rig) -> None:
    rig.attach()
    rig.side.begin(Orders(loads=(order("r", [1]),)))
    rig.until(lambda: rig.finished)
    rig.take()
    assert rig.finished == ["r"]
    assert next(r.loaded["r"] for r in rig.reports if r.loaded).good == 1
    assert isinstance(rig.reports[-1].loaded.get("r"), Loaded)
