"""What a kvbm daemon publishes of its tiers: changes of one namespace as events that explain
themselves, so that no receiver has to know which models the daemon keeps.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.common.blocks import block_key
from services.common.events.model import BlocksRemoved, BlocksStored, Event, Tier
from services.common.ids import BlockKey

REMOTE_LABEL = "g4"
"""Label of a daemon's record: those with an equal one share their remote storage (G4)."""


def tier_events(
    namespace: bytes,
    stored: Iterable[tuple[Tier, bytes]] = (),
    removed: Iterable[tuple[Tier, bytes]] = (),
) -> list[Event]:
    """Events for blocks (tier, full 32-byte hash) that came to and left tiers of a namespace.

    A removal says that the tier's last copy is gone. Removals come first: a block in both lists of
    one tier is there in the end. One event for each tier and direction, none for nothing.
    """
    if len(namespace) != 32:
        raise ValueError(f"a namespace has 32 bytes, not {len(namespace)}")
    events: list[Event] = [
        BlocksRemoved(tier, keys, namespace=namespace) for tier, keys in _by_tier(removed)
    ]
    events += [BlocksStored(tier, keys, namespace=namespace) for tier, keys in _by_tier(stored)]
    return events


def _by_tier(blocks: Iterable[tuple[Tier, bytes]]) -> list[tuple[Tier, tuple[BlockKey, ...]]]:
    tiers: dict[Tier, list[BlockKey]] = {}
    for tier, block_hash in blocks:
        if tier is Tier.G1:
            raise ValueError("G1 is a worker's to tell of")
        tiers.setdefault(tier, []).append(block_key(block_hash))
    return [(tier, tuple(keys)) for tier, keys in tiers.items()]
