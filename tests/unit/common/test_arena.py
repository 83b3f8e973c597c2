"""The arena: its file as every process finds it, headers that don't lie, mappings that last."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.arena import (
    HEADER_BYTES,
    MAX_RANKS,
    PAGE,
    Arena,
    ArenaError,
    CorruptHeader,
    Geometry,
    SlotHeader,
    SlotState,
    checksum,
)

SPACE, OTHER = b"n" * 32, b"o" * 32
GEOMETRY = Geometry(32, 5000, 2, "2 layers")
SEALED = SlotHeader(
    SlotState.SEALED, 7, b"k" * 32, b"p" * 32, 3, 11, 13, 17, 19, GEOMETRY.payload_bytes, (21, 22)
)

CHECK_AT = 196
"""Where a header's own checksum lies."""

keys = st.binary(min_size=32, max_size=32)
words = st.integers(0, 2**64 - 1)
any_header = st.builds(
    SlotHeader,
    st.sampled_from(SlotState),
    words,
    keys,
    keys,
    st.integers(0, 2**32 - 1),
    words,
    words,
    words,
    words,
    words,
    st.lists(words, max_size=MAX_RANKS).map(tuple),
)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena.create(tmp_path / "a.arena", SPACE, GEOMETRY, 5)
    yield made
    made.close()


# -- headers --------------------------------------------------------------------------------------


@given(any_header, keys)
def test_a_header_comes_back_as_it_was_written(header: SlotHeader, namespace: bytes) -> None:
    raw = header.pack(namespace)
    assert len(raw) == HEADER_BYTES
    assert SlotHeader.unpack(raw, namespace) == header


def test_headers_and_checksums_are_the_same_everywhere() -> None:
    """I1, I2: nothing of one process is in them, so that others, and later versions, read them."""
    assert hashlib.sha256(SEALED.pack(SPACE)).hexdigest() == (
        "754de97b5f99991fac285cfd1e2aa6d9b110bcc95ba23260b9bc9fb2f8573624"
    )
    assert (
        checksum(b"forebay", bytes(1000))
        == checksum(b"fore", b"bay" + bytes(1000))
        == 17562125866376825611
    )


def test_no_flipped_bit_of_a_header_passes() -> None:
    raw = SEALED.pack(SPACE)
    for bit in range(8 * HEADER_BYTES):
        bad = bytearray(raw)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptHeader):
            SlotHeader.unpack(bad, SPACE)


def test_a_header_of_another_namespace_is_corrupt() -> None:
    """I5: bytes of other weights under the same name can't be taken for ours."""
    with pytest.raises(CorruptHeader):
        SlotHeader.unpack(SEALED.pack(OTHER), SPACE)


@settings(max_examples=30)
@given(any_header, any_header)
def test_a_half_written_header_is_corrupt_or_one_of_the_two(
    before: SlotHeader, after: SlotHeader
) -> None:
    """C5: who dies in the midst of sealing has sealed nothing."""
    old, new = before.pack(SPACE), after.pack(SPACE)
    for end in range(0, HEADER_BYTES + 1, 4):
        torn = new[:end] + old[end:]
        try:
            found = SlotHeader.unpack(torn, SPACE)
        except CorruptHeader:
            continue
        assert found in (before, after)


def test_zeros_are_a_free_slot_and_other_lengths_no_header() -> None:
    assert SlotHeader.unpack(bytes(HEADER_BYTES), SPACE) == SlotHeader(SlotState.FREE, 0)
    with pytest.raises(CorruptHeader):
        SlotHeader.unpack(SEALED.pack(SPACE)[:-1], SPACE)


def test_values_that_make_no_sense_are_corrupt_even_when_the_sum_fits() -> None:
    raw = bytearray(SEALED.pack(SPACE))
    raw[0] = 9
    raw[CHECK_AT : CHECK_AT + 8] = checksum(SPACE, bytes(raw[:CHECK_AT])).to_bytes(8, "little")
    with pytest.raises(CorruptHeader, match="no sense"):
        SlotHeader.unpack(raw, SPACE)


# -- the file -------------------------------------------------------------------------------------


def test_all_processes_see_one_arena(arena: Arena) -> None:
    other = Arena.open(arena.path)
    assert (other.namespace, other.geometry, other.slots) == (SPACE, GEOMETRY, 5)
    arena.payload(3)[:] = bytes(range(100)) * 100
    arena.write_header(3, SEALED)
    assert other.header(3) == SEALED
    assert bytes(other.shard(3, 1)) == bytes(range(100)) * 50
    assert other.checksums(3) == (checksum(bytes(range(100)) * 50),) * 2
    assert [isinstance(h, SlotHeader) and h.state for h in other.headers()] == [0, 0, 0, 2, 0]
    assert other.payload_address(3) % PAGE == 0
    other.close()


def test_every_byte_is_allocated_and_no_more_than_asked(arena: Arena) -> None:
    """L8: what is taken is what the slots need; and no hole is left that could fault later."""
    status = arena.path.stat()
    assert status.st_size == arena.length == Arena.size(GEOMETRY, 5)
    assert status.st_blocks * 512 >= status.st_size
    # Up to the file system's own books.
    assert status.st_blocks * 512 <= status.st_size + 64 * PAGE


@given(st.integers(1, 20_000), st.integers(1, MAX_RANKS), st.integers(0, 1 << 24))
def test_as_many_slots_as_fit(shard: int, ranks: int, room: int) -> None:
    geometry = Geometry(32, shard, ranks)
    slots = Arena.fitting(geometry, room)
    assert slots == 0 or Arena.size(geometry, slots) <= room
    assert Arena.size(geometry, slots + 1) > room


def test_opening_maps_all_pages_at_once() -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no tmpfs")
    path = shm / f"forebay-test-{os.getpid()}-{random.randbytes(4).hex()}.arena"
    try:
        Arena.create(path, SPACE, Geometry(32, PAGE), 2000).close()
        arena = Arena.open(path)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        assert sum(arena.payload(slot)[0] for slot in range(2000)) == 0
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 200
        arena.close()
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_an_older_kernel_maps_them_by_reading(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("services.common.arena._MADV_POPULATE_WRITE", 12345)
    heard: list[tuple[int, int]] = []
    other = Arena.open(arena.path, lambda done, total: heard.append((done, total)))
    assert heard == [(other.length, other.length)]
    other.close()


def test_what_does_not_fit_is_refused_before_anything_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=r"1048832.00 GiB: No space left") as caught:
        Arena.create(tmp_path / "a.arena", SPACE, Geometry(32, 1 << 20), 1 << 30)
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_fills_up_meanwhile_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match="No space left"):
        Arena.create(tmp_path / "a.arena", SPACE, GEOMETRY, 5)
    assert not list(tmp_path.iterdir())


def test_making_tells_how_far_it_is_and_can_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2: a long step is heard of, and nobody has to wait for its end to stop."""
    monkeypatch.setattr("services.common.arena._CHUNK", 1 << 20)
    heard: list[float] = []

    def tell(done: int, total: int) -> None:
        heard.append(done / total)
        if len(heard) == 6:
            raise InterruptedError("stop")

    path = tmp_path / "a.arena"
    with pytest.raises(OSError, match="stop"):
        Arena.create(path, SPACE, Geometry(32, PAGE), 1000, tell)
    assert not list(tmp_path.iterdir())
    assert heard == sorted(heard)
    heard.clear()
    monkeypatch.setattr("services.common.arena._CHUNK", 2 << 20)
    Arena.create(path, SPACE, Geometry(32, PAGE), 1000, lambda d, t: heard.append(d / t)).close()
    assert heard == sorted(heard)
    assert heard[-1] == 1.0


def test_a_leftover_that_is_mapped_is_not_cut_short(tmp_path: Path) -> None:
    leftover = tmp_path / "a.making"
    Arena.create(tmp_path / "a.arena", SPACE, GEOMETRY, 50).path.rename(leftover)
    mapped = Arena.open(leftover)
    Arena.create(tmp_path / "a.arena", SPACE, GEOMETRY, 5).close()
    # A SIGBUS, had its file been truncated.
    assert mapped.payload(49)[-1] == 0
    mapped.close()


def test_no_byte_of_the_file_header_can_change_unseen(arena: Arena) -> None:
    """C7: another layout, or a damaged one, is no arena."""
    whole = arena.path.read_bytes()
    used = len(whole[:PAGE].rstrip(b"\0"))
    assert used > 80
    for at in range(used):
        bad = bytearray(whole)
        bad[at] ^= 0x41
        path = arena.path.with_name("bad.arena")
        path.write_bytes(bad)
        with pytest.raises(CorruptHeader):
            Arena.open(path)


def test_an_arena_of_another_version_or_length_is_none(arena: Arena) -> None:
    whole = arena.path.read_bytes()
    path = arena.path.with_name("bad.arena")
    for content, why in (
        (b"FBARENA2" + whole[8:], "version"),
        (whole[:-1], "length"),
        (whole + b"\0", "length"),
        (whole[:100], "version"),
        (b"", "version"),
    ):
        path.write_bytes(content)
        with pytest.raises(CorruptHeader, match=why):
            Arena.open(path)


def test_what_is_no_file_is_no_arena(tmp_path: Path, arena: Arena) -> None:
    link, pipe = tmp_path / "link.arena", tmp_path / "pipe.arena"
    link.symlink_to(arena.path)
    os.mkfifo(pipe)
    for path, error in ((link, ArenaError), (tmp_path, ArenaError), (pipe, CorruptHeader)):
        with pytest.raises(error):
            Arena.open(path)
    with pytest.raises(ArenaError, match="No such file"):
        Arena.open(tmp_path / "none.arena")


def test_arguments_that_can_t_be_right(tmp_path: Path, arena: Arena) -> None:
    for namespace, geometry, slots in (
        (b"short", GEOMETRY, 1),
        (SPACE, GEOMETRY, 0),
        (SPACE, replace(GEOMETRY, layout="x" * PAGE), 1),
    ):
        with pytest.raises(ValueError, match=r"namespace|layout"):
            Arena.create(tmp_path / "b.arena", namespace, geometry, slots)
    for ranks, size, shard in ((0, 32, 1), (MAX_RANKS + 1, 32, 1), (1, 0, 1), (1, 32, 0)):
        with pytest.raises(ValueError, match="must be"):
            Geometry(size, shard, ranks)
    for slot in (-1, 5):
        with pytest.raises(IndexError):
            arena.payload(slot)
        with pytest.raises(IndexError):
            arena.header(slot)
        with pytest.raises(IndexError):
            arena.write_header(slot, SEALED)
    with pytest.raises(IndexError):
        arena.shard(0, 2)


# -- what a slot holds ----------------------------------------------------------------------------


def test_a_slot_holds_a_block_only_sealed_whole_and_in_its_generation(arena: Arena) -> None:
    """C4: key, generation and length are stamped on each block, and looked at."""
    arena.write_header(1, SEALED)
    assert arena.holds(1, 7, b"k" * 32)
    assert not arena.holds(1, 8, b"k" * 32)
    assert not arena.holds(1, 7, b"K" * 32)
    assert not arena.holds(2, 7, b"k" * 32)
    for change in (
        {"state": SlotState.FILLING},
        {"payload_bytes": GEOMETRY.payload_bytes - 1},
        {"checksums": (21,)},
    ):
        arena.write_header(1, replace(SEALED, **change))  # type: ignore[arg-type]
        assert not arena.holds(1, 7, b"k" * 32)
    arena.write_header(1, SEALED)
    with arena.path.open("r+b") as file:
        file.seek(PAGE + HEADER_BYTES + 50)
        file.write(b"!")
    assert not arena.holds(1, 7, b"k" * 32)


# -- the mapping ----------------------------------------------------------------------------------


def test_views_outlive_close_and_nothing_else_does(arena: Arena) -> None:
    """L7: a mapping goes with its last view, never before, and never later."""
    view = arena.payload(0)
    before = _mappings(arena.path)
    arena.close()
    arena.close()
    view[:] = b"x" * len(view)
    assert bytes(view[-3:]) == b"xxx"
    assert _mappings(arena.path) == before == 1
    with pytest.raises(ValueError, match="released"):
        arena.header(0)
    del view
    assert _mappings(arena.path) == 0


def test_without_views_close_unmaps_at_once(arena: Arena) -> None:
    assert _mappings(arena.path) == 1
    arena.close()
    assert _mappings(arena.path) == 0


def test_locking_says_why_not(arena: Arena) -> None:
    """Memory that can't be locked still works: it is said, not fatal."""
    arena.address = 0
    assert arena.lock_memory() == os.strerror(errno.ENOMEM)


def _mappings(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_pages_are_mapped_in_small_pieces(tmp_path: Path) -> None:
    """A process that maps much in one call stands still meanwhile: it can't even allocate."""
    told: list[tuple[int, int]] = []
    slots = (40 << 20) // GEOMETRY.stride
    made = Arena.create(
        tmp_path / "b.arena", SPACE, GEOMETRY, slots, lambda done, total: told.append((done, total))
    )
    made.close()
    total = told[-1][1]
    mapped = [2 * (done - total // 2) for done, _ in told if done > total // 2]
    steps = [b - a for a, b in zip([0, *mapped], mapped, strict=False)]
    assert len(steps) >= 3 and max(steps) <= (16 << 20) + 1
