"""How one simulated engine names KV to another: by the tokens that it is of, since there are no
bytes. JSON types alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def handle(tokens: Sequence[int], hashes: Sequence[bytes], block_size: int) -> dict[str, Any]:
    """Names the KV of `tokens`, whose full blocks have these hashes."""
    return {
        "tokens": len(tokens),
        "last": hashes[-1].hex() if hashes else "",
        "tail": list(tokens[len(hashes) * block_size :]),
    }
