"""Copies between a cache on a GPU and the arena, in large batches on streams of their own.

A batch is gathered on the device, layer by layer, into one buffer, so that a slot is one copy over
the bus. Its checksums are taken on the host from a second reading of the cache: what they say is
what the cache holds, not what was sent. No GPU was at hand when this was written: its logic is
tested with a device that isn't one, its speed is unmeasured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import xxhash

from services.common.arena import Arena
from services.common.telemetry.logging import get_logger
from services.worker.connector.cachelayout import CacheLayout
from services.worker.connector.lanes import Lane, Lanes

log = get_logger(__name__)

BATCH_BYTES = 64 << 20
PIN_BYTES = 64 << 30
"""Most bytes registered in one call: much larger ones were seen to fail."""
DEPTH = 2


class Device(Protocol):
    """What is needed of a GPU."""

    def stream(self) -> Any:
        """A new stream."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within it, work goes to that stream."""
        ...

    def mark(self) -> Any:
        """An event after all work that the current stream was given."""
        ...

    def hold(self, stream: Any, event: Any) -> None:
        """Lets the stream begin nothing before the event; None: before all work of the device."""
        ...

    def wait(self, event: Any) -> None:
        """Waits for an event. Raises RuntimeError when work before it failed."""
        ...

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device."""
        ...

    def bounce(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory of the host."""
        ...

    def pin(self, address: int, length: int) -> str:
        """Registers host memory; empty, or why not. Leaves no error behind in the device."""
        ...

    def unpin(self, address: int) -> None:
        """Takes `pin` back."""
        ...


class _Cuda:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)  # type: ignore[no-any-return]

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    def hold(self, stream: Any, event: Any) -> None:
        if event is None:
            torch.cuda.synchronize(self._device)
        else:
            stream.wait_event(event)

    def wait(self, event: Any) -> None:
        event.synchronize()

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def bounce(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def pin(self, address: int, length: int) -> str:
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            # Portable: valid for all devices of the process.
            code = runtime.cudaHostRegister(address, length, 1)
            if int(code) == 0:
                return ""
            why = str(runtime.cudaGetErrorString(code))
            self._clear_error()
        return why

    def _clear_error(self) -> None:
        # Else the next kernel's launch would report it as its own.
        try:
            torch.zeros(1, device=self._device).add_(1)
        except RuntimeError as exc:
            log.debug("cleared an error of the device", error=str(exc))

    def unpin(self, address: int) -> None:
        if int(torch.cuda.cudart().cudaHostUnregister(address)):
            self._clear_error()


def cuda(device: torch.device) -> Device:
    """An NVIDIA GPU by torch."""
    return _Cuda(device)


class _Buffers:
    """One batch's memory."""

    def __init__(self, device: Device, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.staging = device.buffer(shape, dtype)
        self.read = device.buffer(shape, dtype)
        """Apart from `staging`, so that what is read again can't be what was sent."""
        self.bounce = device.bounce(shape, dtype)


class _GpuLane:
    """Batches in one direction: `out` of the cache, or into it."""

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        shard: Callable[[int], torch.Tensor],
        device: Device,
        batch_blocks: int,
        out: bool,
    ) -> None:
        """layers: `[blocks, words]` each. shard: a slot's words, `[layers, words]`."""
        self._batch_blocks = batch_blocks
        self.stream = device.stream()
        self._layers = layers
        self._shard = shard
        self._device = device
        self._out = out
        shape = (batch_blocks, len(layers), layers[0].shape[1])
        self._buffers = [_Buffers(device, shape, layers[0].dtype) for _ in range(DEPTH)]
        self._turn = 0

    def move(self, blocks: Sequence[int], slots: Sequence[int], sums: bool) -> Iterator[int]:
        running: deque[tuple[Any, _Buffers, int]] = deque()
        try:
            for at in range(0, len(blocks), self._batch_blocks):
                end = at + self._batch_blocks
                running.append(self._begin(blocks[at:end], slots[at:end], sums))
                if len(running) == DEPTH:
                    yield from self._finish(*running.popleft(), sums)
            while running:
                yield from self._finish(*running.popleft(), sums)
        finally:
            # After an error: who hears of it may give the slots away.
            for done, _, _ in running:
                self._end(done)

    def _begin(
        self, blocks: Sequence[int], slots: Sequence[int], sums: bool
    ) -> tuple[Any, _Buffers, int]:
        buffers = self._buffers[self._turn]
        self._turn = (self._turn + 1) % DEPTH
        count = len(blocks)
        with self._device.on(self.stream):
            index = torch.tensor(blocks, dtype=torch.long, device=self._layers[0].device)
            staging = buffers.staging[:count]
            if self._out:
                self._gather(index, staging)
            for number, slot in enumerate(slots):
                one, other = staging[number], self._shard(slot)
                (other if self._out else one).copy_(one if self._out else other, non_blocking=True)
            if not self._out:
                for number, layer in enumerate(self._layers):
                    layer.index_copy_(0, index, staging[:, number])
            if sums:
                self._gather(index, buffers.read[:count])
                buffers.bounce[:count].copy_(buffers.read[:count], non_blocking=True)
            return self._device.mark(), buffers, count

    def _gather(self, index: torch.Tensor, into: torch.Tensor) -> None:
        for number, layer in enumerate(self._layers):
            into[:, number].copy_(layer.index_select(0, index))

    def _finish(self, done: Any, buffers: _Buffers, count: int, sums: bool) -> Iterator[int]:
        self._device.wait(done)
        rows = buffers.bounce.view(torch.uint8).numpy()
        for number in range(count):
            yield xxhash.xxh3_64_intdigest(rows[number]) if sums else 0

    def _end(self, done: Any) -> None:
        try:
            self._device.wait(done)
        except RuntimeError as exc:
            # Its context is lost, and with it whatever was under way.
            log.error("copies failed", error=str(exc))


def gpu_lanes(
    layout: CacheLayout,
    caches: Sequence[torch.Tensor],
    arena: Arena,
    rank: int,
    device: Device,
    batch_bytes: int = BATCH_BYTES,
) -> Lanes:
    """Both directions for a cache on a device. Pins the arena; unpinned, copies are slower."""
    words = _word(layout, caches)
    size = layout.piece_bytes // words.itemsize
    layers = [_rows(cache, layout, words, size) for cache in caches]

    def shard(slot: int) -> torch.Tensor:
        return torch.frombuffer(arena.shard(slot, rank), dtype=words).view(len(layers), size)

    count = max(1, min(layout.num_blocks, batch_bytes // layout.shard_bytes))
    save = _GpuLane(layers, shard, device, count, out=True)
    load = _GpuLane(layers, shard, device, count, out=False)
    pinned = pin_arena(arena, device)

    def hold(lane: Lane, event: Any) -> None:
        device.hold(save.stream if lane is save else load.stream, event)

    def clear(blocks: Sequence[int]) -> None:
        with device.on(load.stream):
            index = torch.tensor(blocks, dtype=torch.long, device=layers[0].device)
            for layer in layers:
                layer.index_fill_(0, index, 0)
            done = device.mark()
        device.wait(done)

    def close() -> None:
        for lane in (save, load):
            with device.on(lane.stream):
                last = device.mark()
            device.wait(last)
        while pinned:
            device.unpin(pinned.pop())

    return Lanes(save, load, device.mark, hold, clear, close)


def pin_arena(arena: Arena, device: Device, most: int = PIN_BYTES) -> list[int]:
    """Registers the payloads in pieces of whole slots, as no copy may cross two; their addresses.

    None at all when one fails, with a line in the log.
    """
    stride = arena.geometry.stride
    step = max(1, most // stride)
    pinned: list[int] = []
    for first in range(0, arena.slots, step):
        count = min(step, arena.slots - first)
        address = arena.payload_address(first)
        why = device.pin(address, count * stride)
        if why:
            log.warning(
                "the arena can't be pinned: copies to the GPU will be slow",
                path=str(arena.path),
                bytes=count * stride,
                reason=why,
            )
            while pinned:
                device.unpin(pinned.pop())
            break
        pinned.append(address)
    return pinned


def _word(layout: CacheLayout, caches: Sequence[torch.Tensor]) -> torch.dtype:
    """The widest word that all pieces are whole numbers of: fewer elements to gather."""
    every = [layout.piece_bytes, layout.block_stride]
    every += [c.storage_offset() * c.element_size() for c in caches]
    return torch.int64 if all(value % 8 == 0 for value in every) else torch.uint8


def _rows(cache: torch.Tensor, layout: CacheLayout, words: torch.dtype, size: int) -> torch.Tensor:
    """The layer as `[blocks, words]`, whatever the order within a block."""
    whole = torch.empty(0, dtype=words, device=cache.device).set_(
        cache.untyped_storage(),
        cache.storage_offset() * cache.element_size() // words.itemsize,
        (layout.num_blocks, size),
        (layout.block_stride // words.itemsize, 1),
    )
    return whole
