"""What travels from a prefill engine to a decode engine beside vLLM's own parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

FIELD = "forebay_transfer"
"""Name under `kv_transfer_params`."""


def prompt_digest(token_ids: Iterable[int], salt: str, adapter: tuple[str, str]) -> str:
    """Tells prompts apart whose KV differs, as 32 hex digits: tokens, cache salt, and the adapter's
    name and path (which is named by its weights' digest); ("", ""): none.
    """
    encoded = msgspec.msgpack.encode([list(token_ids), salt, adapter])
    return str(xxhash.xxh3_128_hexdigest(encoded))


@dataclass(frozen=True, slots=True)
class Sums:
    """Checksums of a prompt's blocks, in order; XXH3-64 over a block's bytes in layer order."""

    of_blocks: tuple[int, ...]


def with_sums(params: Mapping[str, Any], sums: Sequence[int] | None) -> dict[str, Any]:
    """A prefill's parameters with checksums; None: nobody here can make them."""
    return {**params, FIELD: {"sums": None if sums is None else list(sums)}}


def sums_of(params: Mapping[str, Any] | None) -> Sums | None:
    """The checksums in a prefill's parameters. None: there are none."""
    plain = (params or {}).get(FIELD) or {}
    sums = plain.get("sums")
    return None if sums is None else Sums(tuple(int(s) for s in sums))


def encode(params: Mapping[str, Any], digest: str) -> bytes:
    """A handle's opaque part."""
    return msgspec.msgpack.encode({"prompt": digest, "params": dict(params)})


def decode(data: bytes) -> tuple[str, dict[str, Any]]:
    """Prompt digest and parameters. Raises ValueError for what `encode` did not make."""
    try:
        plain = msgspec.msgpack.decode(data)
        digest, params = plain["prompt"], plain["params"]
    except (msgspec.DecodeError, TypeError, KeyError) as exc:
        raise ValueError("these are no transfer parameters of this version") from exc
    if not isinstance(digest, str) or not isinstance(params, dict):
        raise ValueError("these are no transfer parameters of this version")
    return digest, params
