"""Timing profiles from published figures: a GPU's data sheet and a model's shape.

Nothing here is measured. A step is bounded by memory bandwidth or by dense 16-bit arithmetic, of
which real engines reach a part (`BANDWIDTH_SHARE`, `COMPUTE_SHARE`); steps and sequences cost a
little besides. GPU figures are NVIDIA's data sheets (dense, without sparsity), models' are their
config.json; a token takes two operations a parameter, and attention four for each layer, head
dimension and pair of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.engines.sim.core.timing import TRANSFER_BYTES_PER_S, TimingProfile

BANDWIDTH_SHARE = 0.7
"""Of a GPU's bandwidth that an engine reaches: an assumption."""
COMPUTE_SHARE = 0.5
"""Of its arithmetic: an assumption."""
MEMORY_SHARE = 0.9
"""Of its memory that an engine takes; vLLM's default."""
STEP_OVERHEAD_S = 0.001
"""Scheduling and launching a step: an assumption."""
SEQUENCE_OVERHEAD_S = 5e-6
"""Sampling and book-keeping of a sequence in a step: an assumption."""
HOST_BYTES_PER_S = 20e9
"""From host memory into a GPU's: an assumption, of a link of 32 GB/s."""
_BYTES = 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's data sheet."""

    memory_bytes: float
    bytes_per_s: float
    flops: float
    """Dense, 16 bit."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense transformer's shape; weights and KV in 16 bits."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's KV."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES


GPUS = {
    "l4": Gpu(24e9, 300e9, 121e12),
    "a100": Gpu(80e9, 2039e9, 312e12),
    "h100": Gpu(80e9, 3350e9, 989e12),
    "h200": Gpu(141e9, 4800e9, 989e12),
}
"""L4, A100 80 GB SXM, H100 SXM, H200 SXM."""
SHAPES = {
    "llama-3.1-8b": Shape(8.03e9, 32, 32, 8, 128),
    "qwen2.5-14b": Shape(14.8e9, 48, 40, 8, 128),
    "qwen2.5-32b": Shape(32.8e9, 64, 40, 8, 128),
}
DEFAULT = "h100/llama-3.1-8b"


def names() -> tuple[str, ...]:
    """All profiles by name: GPU/MODEL, as far as the model leaves room for KV."""
    pairs = ((g, s) for g in GPUS for s in SHAPES)
    return tuple(f"{g}/{s}" for g, s in pairs if _kv_bytes(GPUS[g], SHAPES[s]) > 0)


def published(name: str) -> TimingProfile:
    """The profile GPU/MODEL. Raises ValueError that names the known ones."""
    gpu, shape = _find(name)
    compute, bandwidth = gpu.flops * COMPUTE_SHARE, gpu.bytes_per_s * BANDWIDTH_SHARE
    return TimingProfile(
        name=name,
        source="computed from published figures of the GPU and the model; not measured",
        token_s=2 * shape.parameters / compute,
        weights_s=_BYTES * shape.parameters / bandwidth,
        pair_s=4 * shape.layers * shape.heads * shape.head_dim / compute,
        sequence_s=SEQUENCE_OVERHEAD_S,
        kv_token_s=shape.kv_token_bytes / bandwidth,
        overhead_s=STEP_OVERHEAD_S,
        transfer_token_s=shape.kv_token_bytes / TRANSFER_BYTES_PER_S,
    )


def capacity_tokens(name: str) -> int:
    """Tokens whose KV fit beside the weights. Raises ValueError that names the known ones."""
    gpu, shape = _find(name)
    return int(_kv_bytes(gpu, shape) / shape.kv_token_bytes)


def host_block_s(name: str, block_tokens: int) -> float:
    """Seconds to bring a block up from host memory. Raises ValueError that names the known ones."""
    return _find(name)[1].kv_token_bytes * block_tokens / HOST_BYTES_PER_S


def _kv_bytes(gpu: Gpu, shape: Shape) -> float:
    return gpu.memory_bytes * MEMORY_SHARE - shape.parameters * _BYTES


def _find(name: str) -> tuple[Gpu, Shape]:
    if name not in names():
        raise ValueError(f"there is no profile {name!r}; there are {', '.join(names())}")
    gpu, _, shape = name.partition("/")
    return GPUS[gpu], SHAPES[shape]
