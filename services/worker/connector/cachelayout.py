"""How an engine's cache lies in memory: where the bytes of each block are, layer by layer.

A layout that isn't understood for certain is refused, at registration and by name: bytes sliced
wrongly would be served as somebody's context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A cache whose every block is one dense piece a layer, of equal size in all layers."""

    num_blocks: int
    layers: int
    piece_bytes: int
    """Bytes of a block in one layer."""
    block_stride: int
    """Bytes from a block to the next within a layer."""
    words: str
    """All that tells this layout from others: goes into the geometry and the namespace."""

    @property
    def shard_bytes(self) -> int:
        """Bytes of a block in all layers: one rank's shard."""
        return self.layers * self.piece_bytes


def describe(caches: Sequence[torch.Tensor], num_blocks: int | None = None) -> CacheLayout:
    """The layout of a cache of one tensor a layer, `[num_blocks, ...]` each, in layer order.

    `num_blocks` is what the engine says it has; without it the first tensor's word is taken. Layers
    that share one tensor are to be given once. Raises ValueError, which names the layer and what is
    wrong: a first dimension that isn't the blocks, blocks that aren't dense, layers that differ
    (hybrid models), layers that overlap.
    """
    if not caches:
        raise ValueError("the engine has no cache to copy")
    first = caches[0]
    blocks = int(first.shape[0]) if num_blocks is None and first.dim() else num_blocks or 0
    for number, cache in enumerate(caches):
        where = f"layer {number}, {_shape(cache)}"
        if cache.dim() < 2 or cache.shape[0] != blocks:
            raise ValueError(f"{where}: the first dimension must be the {blocks} blocks")
        if cache.numel() == 0:
            raise ValueError(f"{where}: is empty")
        if not _dense(cache):
            raise ValueError(
                f"{where}: a block's bytes must lie together; here they are strided by "
                f"{tuple(cache.stride())}"
            )
        if _kind(cache) != _kind(first):
            raise ValueError(
                f"{where}: differs from layer 0, {_shape(first)}; caches of several kinds (hybrid "
                "models) can't be kept"
            )
    piece = first[0].numel() * first.element_size()
    layout = CacheLayout(
        blocks,
        len(caches),
        piece,
        max(first.stride(0) * first.element_size(), piece),
        f"{len(caches)} layers of {str(first.dtype).removeprefix('torch.')}"
        f"{list(first.shape[1:])} strides {list(first.stride()[1:])}",
    )
    _refuse_overlaps(caches, layout)
    return layout


def _shape(cache: torch.Tensor) -> str:
    return f"{str(cache.dtype).removeprefix('torch.')}{list(cache.shape)}"


def _kind(cache: torch.Tensor) -> tuple[object, ...]:
    return cache.dtype, tuple(cache.shape), tuple(cache.stride()), cache.device


def _dense(cache: torch.Tensor) -> bool:
    """Whether a block's elements fill one piece without holes, in whatever order."""
    expected = 1
    inner = zip(cache.stride()[1:], cache.shape[1:], strict=True)
    for stride, size in sorted(dim for dim in inner if dim[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return bool(cache.shape[0] == 1 or cache.stride(0) >= expected)


def _refuse_overlaps(caches: Sequence[torch.Tensor], layout: CacheLayout) -> None:
    """Two layers in the same bytes would overwrite one another on every load."""
    stride, piece = layout.block_stride, layout.piece_bytes
    at = sorted((cache.data_ptr(), number) for number, cache in enumerate(caches))
    for (low, one), (high, other) in combinations(at, 2):
        # The two blocks of the lower layer next to block 0 of the other: is one too close?
        blocks, rest = divmod(high - low, stride)
        if (rest < piece and blocks < layout.num_blocks) or (
            stride - rest < piece and blocks + 1 < layout.num_blocks
        ):
            raise ValueError(f"layers {one} and {other} share memory")
