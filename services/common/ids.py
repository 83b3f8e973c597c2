"""Names of things that travel between services. Random where two lives of a thing must differ."""

import secrets
from typing import NewType

AttemptId = NewType("AttemptId", str)
BlockKey = NewType("BlockKey", int)
"""Low 64 bits of a block's hash: its key in events and in the router's index."""


def new_incarnation() -> int:
    """A random non-zero 64-bit number for one life of a process (never a pid, which is reused)."""
    return secrets.randbits(64) or 1


def new_id(prefix: str) -> str:
    """`prefix-` and 16 random hex digits."""
    return f"{prefix}-{secrets.token_hex(8)}"
