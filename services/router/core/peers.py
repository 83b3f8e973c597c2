"""Which nodes to fetch a prompt's blocks from: hints for the daemon of the one that needs them.

Knows masks of tiers (tiers.py), not blocks. A hint may be wrong by the time it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_HINTS = 16
"""Parts of one prompt that are told apart."""


@dataclass(frozen=True, slots=True)
class PeerHint:
    """Consecutive blocks that another node holds in host memory."""

    node: str
    first: int
    """Number among the blocks of the hint that it is part of."""
    count: int


def peer_hints(masks: Sequence[int], own: int, nodes: Mapping[int, str]) -> tuple[PeerHint, ...]:
    """Who holds which of consecutive blocks, each part as long as one node has it.

    `masks`: where each block is. `own`: bits by which a block needs no fetch. `nodes`: by the bit
    of their host memory, those that can be fetched from.
    """
    hints: list[PeerHint] = []
    anyone = sum(nodes)
    at = 0
    while at < len(masks) and len(hints) < MOST_HINTS:
        holders = 0 if masks[at] & own else masks[at] & anyone
        if not holders:
            at += 1
            continue
        first = at
        while at < len(masks) and not masks[at] & own and holders & masks[at]:
            holders &= masks[at]
            at += 1
        # Of several the lowest bit: all routers name the same, and it has most of what follows.
        hints.append(PeerHint(nodes[holders & -holders], first, at - first))
    return tuple(hints)
