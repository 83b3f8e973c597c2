"""Copies between an engine's cache and the arena: right bytes, checked where they arrive.

Every test of moving runs on both paths: host memory, and batches as for a GPU (on a device that
isn't one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from services.common.arena import PAGE, Arena, Geometry, SlotHeader, SlotState, checksum
from services.worker.connector import gpucopy
from services.worker.connector.cachelayout import describe
from services.worker.connector.copier import Copier
from services.worker.connector.cpucopy import CpuCache, cpu_lanes
from services.worker.connector.lanes import Lanes
from services.worker.connector.model import LoadItem, Slot
from tests.fakes.gpu import FakeGpu

BLOCKS, LAYERS, SLOTS = 9, 4, 7
SPACE = b"n" * 32
Caches = list[torch.Tensor]


def one_storage(dtype: torch.dtype = torch.bfloat16) -> Caches:
    """As vLLM has it on a CPU: layer after layer, blocks within."""
    return list(noise(LAYERS, BLOCKS, 3, 32, 16).view(torch.bfloat16).to(dtype))


def noise(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(-9999, 9999, shape, dtype=torch.int16, generator=generator)


def interleaved() -> Caches:
    """All layers of a block one after the other."""
    return list(noise(BLOCKS, LAYERS, 2, 32, 8).unbind(1))


def permuted() -> Caches:
    """Heads before tokens in memory, after them in the tensor's words."""
    return [layer.permute(0, 2, 1, 3) for layer in noise(LAYERS, BLOCKS, 3, 32, 8)]


LAYOUTS: dict[str, Callable[[], Caches]] = {
    "one storage": one_storage,
    "a storage a layer": lambda: [layer.clone() for layer in one_storage()],
    "interleaved": interleaved,
    "padded": lambda: list(noise(LAYERS, BLOCKS, 100)[:, :, :72].unbind(0)),
    "unevenly spaced": lambda: [
        c for n, c in enumerate(noise(11, BLOCKS, 40)) if n in (0, 1, 5, 9)
    ],
    "backwards": lambda: one_storage()[::-1],
    "permuted": permuted,
    "odd": lambda: list(noise(LAYERS, BLOCKS, 7).to(torch.uint8)),
    "fp8": lambda: one_storage(torch.float8_e4m3fn),
    "float32": lambda: one_storage(torch.float32),
    "one layer": lambda: one_storage()[:1],
    "one block": lambda: [layer[:1] for layer in one_storage()],
}


class Rig:
    """A copier, its cache and its arena."""

    def __init__(
        self,
        folder: Path,
        caches: Caches,
        lanes: Callable[..., Lanes],
        *,
        ranks: int = 1,
        rank: int = 0,
        verify: bool = True,
    ) -> None:
        self.caches = caches
        layout = describe(caches)
        path = folder / "a.arena"
        self.arena = (
            Arena.open(path)
            if path.exists()
            else Arena.create(path, SPACE, Geometry(32, layout.shard_bytes, ranks), SLOTS)
        )
        self.copier = Copier(caches, self.arena, rank, verify, lanes=lanes)
        self.rank = rank

    def bytes(self, block: int) -> bytes:
        """What the cache holds, in layer order."""
        whole = b""
        for cache in self.caches:
            size = cache[block].numel() * cache.element_size()
            at = cache.untyped_storage().data_ptr()
            at = cache[block].data_ptr() - at
            memory = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
            whole += memory[at : at + size].numpy().tobytes()
        return whole

    def zero(self) -> None:
        for cache in self.caches:
            cache.view(torch.uint8).zero_() if cache.is_contiguous() else cache.zero_()

    def seal(self, slot: int, sums: Sequence[int], key: bytes = b"k" * 32) -> SlotHeader:
        header = SlotHeader(
            SlotState.SEALED,
            3,
            key,
            payload_bytes=self.arena.geometry.payload_bytes,
            checksums=tuple(sums),
        )
        self.arena.write_header(slot, header)
        return header

    def stored(self, blocks: Sequence[int], slots: Sequence[int]) -> list[LoadItem]:
        """Saved and sealed; as loads back into the same blocks."""
        items = []
        for block, slot, total in zip(blocks, slots, self.copier.save(blocks, slots), strict=True):
            self.seal(slot, [total])
            items.append(LoadItem(block, Slot(slot, 3), b"k" * 32, (total,)))
        return items


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture(params=["cpu", "gpu", "gpu in small batches"])
def lanes(request: pytest.FixtureRequest, gpu: FakeGpu) -> Callable[..., Lanes]:
    if request.param == "cpu":
        return cpu_lanes
    size = 20_000 if "small" in request.param else gpucopy.BATCH_BYTES
    return partial(gpucopy.gpu_lanes, device=gpu, batch_bytes=size)


@pytest.fixture
def rig(tmp_path: Path, lanes: Callable[..., Lanes]) -> Iterator[Rig]:
    made = Rig(tmp_path, one_storage(), lanes)
    yield made
    made.copier.close()
    made.arena.close()


# -- moving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_back_byte_for_byte(
    tmp_path: Path, lanes: Callable[..., Lanes], layout: str
) -> None:
    """C7, C10: whatever the layout, a slot holds a block's layers in order, and gives them back."""
    rig = Rig(tmp_path, LAYOUTS[layout](), lanes)
    blocks = [b for b in (5, 0, 8, 3, 7) if b < rig.copier.layout.num_blocks]
    slots = [6, 0, 3, 1, 2][: len(blocks)]
    before = [rig.bytes(b) for b in range(rig.copier.layout.num_blocks)]
    assert len(set(before)) == len(before)
    sums = rig.copier.save(blocks, slots)
    assert sums == [checksum(before[b]) for b in blocks]
    for block, slot in zip(blocks, slots, strict=True):
        assert bytes(rig.arena.shard(slot, 0)) == before[block]
        rig.seal(slot, [sums[blocks.index(block)]])
    rig.zero()
    # Into other blocks than they came from.
    target = blocks[1:] + blocks[:1]
    items = [
        LoadItem(to, Slot(slot, 3), b"k" * 32, (total,))
        for to, slot, total in zip(target, slots, sums, strict=True)
    ]
    assert rig.copier.load(items) == [True] * len(items)
    after = [rig.bytes(b) for b in range(len(before))]
    for block, to in zip(blocks, target, strict=True):
        assert after[to] == before[block]
    for other in set(range(len(before))) - set(target):
        assert not any(after[other])


def test_ranks_fill_their_own_shards(tmp_path: Path, lanes: Callable[..., Lanes]) -> None:
    """T1: one slot, a shard for each rank, none in another's bytes."""
    rigs = [
        Rig(tmp_path, LAYOUTS["odd"](), lanes, ranks=3, rank=0),
        Rig(tmp_path, [c + 1 for c in LAYOUTS["odd"]()], lanes, ranks=3, rank=2),
    ]
    sums = [rig.copier.save([4], [1])[0] for rig in rigs]
    arena = rigs[0].arena
    assert bytes(arena.payload(1)) == rigs[0].bytes(4) + bytes(28) + rigs[1].bytes(4)
    rigs[0].seal(1, [sums[0], checksum(bytes(28)), sums[1]])
    for rig in rigs:
        expected = rig.bytes(4)
        rig.zero()
        item = LoadItem(2, Slot(1, 3), b"k" * 32, (sums[0], 0, sums[1]))
        assert rig.copier.load([item]) == [True]
        assert rig.bytes(2) == expected
        assert rig.copier.load([replace(item, checksums=(sums[0],))]) == [rig.rank == 0]


def test_nothing_to_do(rig: Rig) -> None:
    assert rig.copier.save([], []) == []
    assert rig.copier.load([]) == []


def test_what_isn_t_there_is_never_touched(rig: Rig) -> None:
    """C8: a number out of range is an error or a miss, never some other block's bytes."""
    before = [rig.bytes(b) for b in range(BLOCKS)]
    for blocks, slots in (([0, BLOCKS], [0, 1]), ([0, -1], [0, 1]), ([0, 1], [0, SLOTS])):
        with pytest.raises(IndexError):
            rig.copier.save(blocks, slots)
        assert not any(rig.arena.shard(0, 0))
    item = rig.stored([1], [1])[0]
    for block in (BLOCKS, -1):
        with pytest.raises(IndexError):
            rig.copier.load([item, replace(item, block=block)])
    items = [replace(item, slot=Slot(SLOTS, 3)), item, replace(item, slot=Slot(-1, 3))]
    assert rig.copier.load(items) == [False, True, False]
    assert [rig.bytes(b) for b in range(BLOCKS)] == before


# -- verifying ------------------------------------------------------------------------------------


def test_only_what_was_asked_for_is_good(rig: Rig) -> None:
    """C4, C12: key, generation, state and bytes; each alone makes it a miss, and no other one."""
    items = rig.stored(range(4), range(4))
    wrong: list[LoadItem] = [
        replace(items[1], key=b"x" * 32),
        replace(items[1], slot=Slot(1, 4)),
        replace(items[1], checksums=(items[2].checksums[0],)),
        replace(items[1], checksums=()),
    ]
    for item in wrong:
        assert rig.copier.load([items[0], item, items[2]]) == [True, False, True]
    sealed = rig.arena.header(1)
    for state in (SlotState.FILLING, SlotState.FREE):
        rig.arena.write_header(1, replace(sealed, state=state))
        assert rig.copier.load(items) == [True, False, True, True]
    rig.arena.write_header(1, sealed)
    assert rig.copier.load(items) == [True] * 4


def test_bad_bytes_do_not_stay_in_the_cache(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: a kernel multiplies what lies beyond a sequence's end by 0, and 0 times NaN is NaN."""
    items = rig.stored(range(4), range(4))
    before = [rig.bytes(b) for b in range(BLOCKS)]
    rig.arena.shard(1, 0)[:] = b"\xff" * rig.copier.shard_bytes
    missing = replace(items[3], slot=Slot(SLOTS, 3))
    assert rig.copier.load([*items[:3], missing]) == [True, False, True, False]
    empty = bytes(rig.copier.shard_bytes)
    before[1] = empty
    assert [rig.bytes(b) for b in range(BLOCKS)] == before
    # The same when it breaks in between: what was not found good is not left there.
    real = rig.copier._lanes.load.move

    def move(blocks: Sequence[int], slots: Sequence[int], sums: bool) -> Iterator[int]:
        for number, total in enumerate(real(blocks, slots, sums)):
            if number == 2:
                raise RuntimeError("broken")
            yield total

    monkeypatch.setattr(rig.copier._lanes.load, "move", move)
    with pytest.raises(RuntimeError, match="broken"):
        rig.copier.load(items)
    before[2] = before[3] = empty
    assert [rig.bytes(b) for b in range(BLOCKS)] == before


def test_a_slot_that_is_reused_during_the_copy_is_a_miss(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: the header is looked at after the copy: before it, all was well."""
    items = rig.stored(range(3), range(3))
    real = rig.copier._lanes.load.move

    def move(blocks: Sequence[int], slots: Sequence[int], sums: bool) -> Iterator[int]:
        for slot, total in zip(slots, real(blocks, slots, sums), strict=True):
            if slot == 1:
                rig.arena.write_header(1, replace(rig.arena.header(1), generation=4))
            yield total

    monkeypatch.setattr(rig.copier._lanes.load, "move", move)
    assert rig.copier.load(items) == [True, False, True]


def test_bytes_are_checked_where_they_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1, C10: a copy that was not made, or went wrong on its way, is a miss."""
    copy_in = CpuCache.copy_in
    lost = False

    def wrong(self: CpuCache, block: int, shard: Any) -> None:
        if not lost:
            copy_in(self, block, shard)
        if block == 1:
            rig.caches[2].view(torch.uint8)[1, 0, 0, 0] ^= 1

    monkeypatch.setattr(CpuCache, "copy_in", wrong)
    rig = Rig(tmp_path, one_storage(), cpu_lanes)
    items = rig.stored(range(3), range(3))
    assert rig.copier.load(items) == [True, False, True]
    lost = True
    rig.zero()
    assert rig.copier.load(items) == [False] * 3


def test_a_scatter_that_a_gpu_did_not_make_is_a_miss(
    tmp_path: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: what is hashed was read back from the cache, not from what was sent."""
    rig = Rig(tmp_path, one_storage(), partial(gpucopy.gpu_lanes, device=gpu))
    items = rig.stored(range(3), range(3))
    rig.zero()
    monkeypatch.setattr(torch.Tensor, "index_copy_", lambda self, *args: self)
    assert rig.copier.load(items) == [False] * 3


def test_a_save_s_checksum_is_its_source_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C5: a save that went wrong stores a block that nobody will ever take for good."""
    copy_out = CpuCache.copy_out

    def wrong(self: CpuCache, block: int, shard: Any) -> None:
        copy_out(self, block, shard)
        shard[17] ^= 1

    monkeypatch.setattr(CpuCache, "copy_out", wrong)
    rig = Rig(tmp_path, one_storage(), cpu_lanes)
    items = rig.stored([0, 1], [0, 1])
    assert [i.checksums[0] for i in items] == [checksum(rig.bytes(0)), checksum(rig.bytes(1))]
    assert rig.copier.load(items) == [False, False]


def test_without_verification_everything_is_believed(
    tmp_path: Path, lanes: Callable[..., Lanes]
) -> None:
    """The negative control: it is the checks that find it."""
    rig = Rig(tmp_path, one_storage(), lanes, verify=False)
    items = rig.stored([0], [0])
    good = rig.bytes(0)
    rig.arena.payload(0)[5] ^= 255
    assert rig.copier.load(items) == [True]
    assert rig.bytes(0) != good


# -- layouts that are refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caches", "blocks", "why"),
    [
        ([], None, "no cache"),
        ([torch.zeros(2, 9, 4)], 9, r"layer 0, float32\[2, 9, 4\]: the first dimension .* 9 blo"),
        ([torch.zeros(9)], 9, "first dimension"),
        ([torch.zeros(9, 0)], 9, "empty"),
        ([torch.zeros(2, 9, 4).transpose(0, 1)], 9, r"must lie together.* \(4, 36, 1\)"),
        ([torch.zeros(9, 8)[:, ::2]], None, "must lie together"),
        ([torch.zeros(1, 8).expand(9, 8)], None, "must lie together"),
        ([torch.zeros(9, 8), torch.zeros(9, 4)], None, r"layer 1, float32\[9, 4\]: differs .*hyb"),
        ([torch.zeros(9, 8), torch.zeros(9, 8).half()], None, "hybrid"),
        ([torch.zeros(9, 8), torch.zeros(9, 12)[:, :8]], None, "hybrid"),
        ([torch.zeros(9, 8)] * 2, None, "layers 0 and 1 share memory"),
    ],
)
def test_a_layout_that_is_not_known_for_certain_is_refused(
    caches: Caches, blocks: int | None, why: str
) -> None:
    """C7, C8, K7: at the start and by name, never in the midst of a request."""
    with pytest.raises(ValueError, match=why):
        describe(caches, blocks)


def test_layers_that_overlap_are_refused() -> None:
    """K7: pages that a hybrid model's layers share."""
    memory = torch.arange(1000, dtype=torch.uint8)

    def layer(at: int, stride: int = 20, size: int = 8) -> torch.Tensor:
        return memory.as_strided((9, size), (stride, 1), at)

    for one, other in ((0, 4), (0, 20), (0, 100), (0, 13), (7, 0), (0, 159), (0, 153)):
        with pytest.raises(ValueError, match="share memory"):
            describe([layer(one), layer(other)])
    for one, other in ((0, 8), (0, 12), (0, 180), (0, 168), (28, 0)):
        assert describe([layer(one), layer(other)]).shard_bytes == 16


def test_the_layout_in_words_tells_layouts_apart() -> None:
    """C7: the words are part of the namespace: other strides, other dtype, other order."""
    words = [describe(make()).words for name, make in LAYOUTS.items() if name != "one block"]
    same = {"one storage", "a storage a layer", "backwards"}
    assert len(set(words)) == len(LAYOUTS) - 1 - (len(same) - 1)


def test_an_arena_of_another_size_is_refused(tmp_path: Path) -> None:
    """C8: bytes of a block are asserted against the tensors that are registered."""
    caches = one_storage()
    size = describe(caches).shard_bytes
    arena = Arena.create(tmp_path / "a.arena", SPACE, Geometry(32, size // 16), 2)
    with pytest.raises(ValueError, match=f"{size // 16} bytes, the engine's blocks {size}"):
        Copier(caches, arena, 0)
    arena = Arena.create(tmp_path / "b.arena", SPACE, Geometry(32, size, 2), 2)
    with pytest.raises(ValueError, match="rank 2"):
        Copier(caches, arena, 2)


# -- GPUs -----------------------------------------------------------------------------------------


@pytest.fixture
def late(tmp_path: Path, gpu: FakeGpu) -> Rig:
    return Rig(tmp_path, one_storage(), partial(gpucopy.gpu_lanes, device=gpu))


@pytest.mark.parametrize("marked", [True, False])
def test_nothing_is_read_before_the_forward_pass_is_over(
    late: Rig, gpu: FakeGpu, marked: bool
) -> None:
    """C2: the copy waits for the kernels that fill the block, however late they are."""
    gpu.kernel(lambda: late.caches[3].view(torch.int16).fill_(77))
    after = late.copier.fence() if marked else None
    gpu.kernel(lambda: late.caches[0].view(torch.int16).fill_(88))
    sums = late.copier.save([0], [0]) if not marked else late.copier.save([0], [0], after)
    assert bytes(late.arena.shard(0, 0))[-2:] == (77).to_bytes(2, "little")
    assert sums == [checksum(late.arena.shard(0, 0))]
    # What came after the mark is not waited for: the engine's next step goes on meanwhile.
    assert len(gpu.late) == (1 if marked else 0)


def test_nothing_is_written_while_the_engine_may_still_read(late: Rig, gpu: FakeGpu) -> None:
    """C2, the other way: a block that was freed may still be read by a kernel that runs."""
    items = late.stored([0], [0])
    late.zero()
    seen: list[bytes] = []
    gpu.kernel(lambda: seen.append(late.bytes(0)))
    assert late.copier.load(items) == [True]
    assert seen == [bytes(late.copier.shard_bytes)]


def test_an_error_of_the_device_is_no_success(late: Rig, gpu: FakeGpu) -> None:
    """C1: a transfer that failed is never taken for done."""
    items = late.stored([0], [0])
    gpu.error = "an illegal memory access was encountered"
    for call in (lambda: late.copier.load(items), lambda: late.copier.save([0], [0])):
        with pytest.raises(RuntimeError, match="illegal"):
            call()


def test_after_an_error_nothing_is_under_way(tmp_path: Path, gpu: FakeGpu) -> None:
    """C1: who hears of it gives the slots away, and nothing may be written to them any more."""
    rig = Rig(tmp_path, one_storage(), partial(gpucopy.gpu_lanes, device=gpu, batch_bytes=1))
    gpu.error = "an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal"):
        rig.copier.save([0, 1, 2, 3], [0, 1, 2, 3])
    # Two batches were begun when the first one's end was awaited.
    assert gpu.waits == 2


def test_large_arenas_are_pinned_in_pieces_of_whole_slots(late: Rig, gpu: FakeGpu) -> None:
    """K6: no registration beyond the limit, and no slot in two of them."""
    late.copier.close()
    assert gpu.pinned == {}
    gpu.pins.clear()
    stride = late.arena.geometry.stride
    gpucopy.pin_arena(late.arena, gpu, most=3 * stride + PAGE)
    assert gpu.pins == [
        (late.arena.payload_address(first), count * stride)
        for first, count in ((0, 3), (3, 3), (6, 1))
    ]


def test_memory_that_can_t_be_pinned_is_said_and_left(late: Rig, gpu: FakeGpu) -> None:
    """K6, L8: half a registration is none."""
    late.copier.close()
    gpu.pins.clear()
    gpu.refuse_pin_after = 2
    with capture_logs() as logs:
        assert gpucopy.pin_arena(late.arena, gpu, most=late.arena.geometry.stride) == []
    assert gpu.pinned == {}
    assert logs[0]["reason"] == "out of memory"


def test_a_failed_registration_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """K6: the runtime remembers it, and the next kernel would be blamed."""

    class Runtime:
        pending = 0

        def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
            self.pending = 2
            return 2

        def cudaHostUnregister(self, address: int) -> int:
            self.pending = 3
            return 3

        def cudaGetErrorString(self, code: int) -> str:
            return {2: "out of memory"}[code]

    runtime = Runtime()
    zeros = torch.zeros

    def launch(*args: Any, **more: Any) -> torch.Tensor:
        pending, runtime.pending = runtime.pending, 0
        if pending:
            raise RuntimeError("CUDA error: out of memory")
        return zeros(*args)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: FakeGpu().on(None))
    monkeypatch.setattr(torch, "zeros", launch)
    device = gpucopy.cuda(torch.device("cuda:0"))
    assert device.pin(4096, 4096) == "out of memory"
    assert runtime.pending == 0
    device.unpin(4096)
    assert runtime.pending == 0
