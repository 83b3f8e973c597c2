"""How large the offload demonstration's caches are, for a model and its documents.

In documents, so that the same happens with every model: G1 holds two of them, G2 three, G3 all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.errors import ModelError

_BLOCK_TOKENS = 32
"""The engine's blocks on CPUs."""
_FLOAT32_BYTES = 4
_TEMPLATE_TOKENS = 96
"""More than a chat template adds, and the answer."""
_GRANTED = 64
"""Empty slots of G2 that an engine keeps to save into."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks by tier, and what follows from them for a model in float32."""

    max_model_len: int
    g1_blocks: int
    g2_blocks: int
    g3_blocks: int
    block_bytes: int

    def gib(self, blocks: int) -> float:
        """GiB of so many blocks, a little more for what stands beside them."""
        return blocks * self.block_bytes * 1.01 / _GIB


def sizes_for(folder: Path, prompts: Sequence[str]) -> Sizes:
    """For the model in a folder, and these prompts. Raises ModelError when it can't be read."""
    # Exactly as the gateway counts; it takes a moment to import.
    from services.gateway.adapters.tokenizer import Tokenizer

    try:
        config = json.loads((folder / "config.json").read_text())
        block = block_bytes(config)
        tokenizer = Tokenizer.load(folder)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ModelError(f"the demonstration needs a model folder; {folder}: {exc!r}") from exc
    try:
        longest = max(len(tokenizer.encode(p)) for p in prompts)
    finally:
        tokenizer.close()
    document = -(-(longest + _TEMPLATE_TOKENS) // _BLOCK_TOKENS)
    return Sizes(
        max_model_len=document * _BLOCK_TOKENS,
        g1_blocks=round(document * 2.3) + 2,
        g2_blocks=round(document * 3.2) + _GRANTED,
        g3_blocks=document * (len(set(prompts)) + 4),
        block_bytes=block,
    )


def block_bytes(config: dict[str, Any]) -> int:
    """Bytes of a block in float32, by a model's config.json. KeyError: it is of another kind."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values = 2 * kv_heads * head_dim * config["num_hidden_layers"]
    return int(values * _FLOAT32_BYTES * _BLOCK_TOKENS)
