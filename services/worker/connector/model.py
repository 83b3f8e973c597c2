"""Words of the connector: what is ordered of the worker side and what it reports back.

They travel between processes (pickled) when the engine's worker is one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of the arena in one of its uses."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    """A block in G2 that may be copied under a lease; `checksums`: each rank's shard."""

    slot: Slot
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Attachment:
    """What an engine needs to use an arena as `owner`."""

    owner: int
    lock_path: str
    arena_path: str
    verify: bool = True


@dataclass(frozen=True, slots=True)
class LoadItem:
    """One block to bring in: where it lies, where it goes, and what it must be."""

    block: int
    """The engine's block id."""
    slot: Slot
    key: bytes
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One request's load, in the order of its blocks."""

    request: str
    blocks: tuple[int, ...]
    """All blocks that the engine waits for."""
    items: tuple[LoadItem, ...]
    """What can be brought into the leading ones."""


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Blocks that a step completes, and the slots they go to."""

    job: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load ended."""

    good: int
    """Leading blocks that were copied and verified."""
    bad: tuple[int, ...] = ()
    """Numbers in the order of blocks whose bytes were not what they should be."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Saved:
    """How a save ended: each block's checksum, in order; None: it was not copied."""

    checksums: tuple[int | None, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Orders:
    """What the worker side is told with a step."""

    attach: Attachment | None = None
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What the worker side tells after a step."""

    attached: Mapping[int, str] = field(default_factory=dict)
    """By owner: empty, or why its arena can't be used."""
    loaded: Mapping[str, Loaded] = field(default_factory=dict)
    saved: Mapping[int, Saved] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.attached or self.loaded or self.saved)
