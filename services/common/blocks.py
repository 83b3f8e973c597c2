"""The block hash: the engine's own chain of full KV blocks, computed without the engine.

h_0 = sha256(cbor("vllm-none-hash")), h_i = sha256(cbor((h_{i-1}, tokens_i, extra_i))), with
canonical CBOR (RFC 8949, 4.2.1). `extra` is None, or a tuple of the adapter's ("lora", name, path)
on every block, then ("cache_salt", salt) on the first block only. Equal to vLLM 0.32 with
prefix_caching_hash_algo="sha256_cbor" (tests/contract/test_block_hash.py holds it to that).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import cbor2

from services.common.ids import BlockKey

ROOT_HASH = hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()
"""Parent of every first block."""

_LOW_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class HashedAdapter:
    """An adapter as the hash sees it: its name, and the path the engine loaded it from."""

    name: str
    path: str


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    *,
    adapter: HashedAdapter | None = None,
    cache_salt: str = "",
) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, 32 bytes each, in chain order.

    A trailing partial block has no hash. An empty `cache_salt` means none.
    """
    if block_size <= 0:
        raise ValueError(f"block_size must be positive, not {block_size}")
    every: tuple[tuple[str, ...], ...] = (("lora", adapter.name, adapter.path),) if adapter else ()
    first = (*every, ("cache_salt", cache_salt)) if cache_salt else every
    parent = ROOT_HASH
    hashes = []
    extra = first or None
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = tuple(token_ids[start : start + block_size])
        parent = hashlib.sha256(cbor2.dumps((parent, block, extra), canonical=True)).digest()
        hashes.append(parent)
        extra = every or None
    return hashes


def next_block_hash(
    parent: bytes, block: Sequence[int], *, adapter: HashedAdapter | None = None
) -> bytes:
    """Hash of the full block that follows the one whose hash is `parent` (not of a first block)."""
    extra = (("lora", adapter.name, adapter.path),) if adapter else None
    return hashlib.sha256(cbor2.dumps((parent, tuple(block), extra), canonical=True)).digest()


def block_key(block_hash: bytes) -> BlockKey:
    """The low 64 bits of a block's hash, read big-endian."""
    return BlockKey(int.from_bytes(block_hash, "big") & _LOW_64)


def block_keys(
    token_ids: Sequence[int],
    block_size: int,
    *,
    adapter: HashedAdapter | None = None,
    cache_salt: str = "",
) -> list[BlockKey]:
    """Index keys of the full blocks of `token_ids`, in chain order."""
    return [
        block_key(h)
        for h in block_hashes(token_ids, block_size, adapter=adapter, cache_salt=cache_salt)
    ]
