"""The ports of the tiers below G2, as the daemon's shell sees them."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common.arena import Arena, CorruptHeader, Geometry, SlotHeader


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block between an arena slot and a place in the tier."""

    arena_slot: int
    header: SlotHeader
    """Of the block as it shall be (a store) or must be (a load): key, parent, checksums, length."""
    slot: int = -1
    """Slot of the tier (disk only)."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """How a batch ended: for each block, in order, None (done, and for loads verified) or why not.

    "corrupt: ..." means that the tier's bytes are bad, and the caller drops that copy. `fence`: as
    in movers/port.py; until it was awaited, arena slots (loads) and tier slots (stores) of blocks
    that failed may still be written.
    """

    errors: Sequence[str | None]
    seconds: float = 0.0
    fence: Awaitable[None] | None = None
    headers: Sequence[SlotHeader | None] = ()
    """Loads of objects only: each block's header as it was stored."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a tier stores at present; a degraded one still loads, and tries again by itself."""

    ok: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    """One block in a peer's window."""

    header: bytes
    """Its sealed header, 256 bytes."""
    address: int
    length: int


@dataclass(frozen=True, slots=True)
class Export:
    """What can be read of a peer; meanings as in kvbm.proto's ExportResponse."""

    id: int
    expires_ms: int
    agent: str
    metadata: bytes
    blocks: Sequence[Exported]
    available: int
    reason: str = ""


class PeerError(Exception):
    """A peer did not do what was asked; the words say why. It costs blocks, and no more."""


class PeerCalls(Protocol):
    """Calls to the daemons of other nodes, by address. Each raises PeerError."""

    async def locate(
        self,
        address: str,
        namespace: bytes,
        geometry: Geometry,
        keys: Sequence[bytes],
        timeout_s: float,
    ) -> int:
        """How many leading blocks of a chain it has in memory."""
        ...

    async def export(
        self,
        address: str,
        namespace: bytes,
        geometry: Geometry,
        keys: Sequence[bytes],
        short_keys: Sequence[int],
        known_agent: str,
        timeout_s: float,
    ) -> Export:
        """Puts leading blocks where they can be read; by full hashes or, without, by short ones."""
        ...

    async def end(
        self,
        address: str,
        exports: Sequence[int],
        namespace: bytes,
        bad_keys: Sequence[bytes],
        timeout_s: float,
    ) -> None:
        """These have been read."""
        ...

    async def close(self) -> None:
        """Closes all connections."""
        ...


class DiskSpace(Protocol):
    """One namespace's slots on the local disk."""

    slots: int

    def headers(self) -> Iterator[SlotHeader | CorruptHeader]:
        """What each slot holds, as found at start, in slot order."""
        ...

    async def store(self, transfers: Sequence[Transfer], timeout_s: float) -> Transferred:
        """Arena -> disk: payload first, then the header. A slot that fails holds nothing."""
        ...

    async def load(self, transfers: Sequence[Transfer], timeout_s: float) -> Transferred:
        """Disk -> arena, verified in the arena. The arena's header is not written here."""
        ...

    async def erase(self, slots: Sequence[int]) -> None:
        """Makes sure that no later start finds blocks in these slots."""
        ...

    async def grow(self) -> int:
        """Takes more of the disk if the cap and the free-space floor allow; how many slots came."""
        ...

    def take_lost(self) -> set[int]:
        """Slots whose blocks were found to be gone since the last call: files were deleted."""
        ...

    async def close(self, *, remove: bool = False) -> None:
        """Closes its files; removes them too when asked."""
        ...


class Stale(Protocol):
    """A namespace's files, as found in the folder."""

    @property
    def namespace(self) -> bytes:
        """Its digest."""
        ...

    @property
    def used_s(self) -> float:
        """Unix time of its last use."""
        ...


class DiskTier(Protocol):
    """The local disk (G3)."""

    backend: str
    place: str
    health: Health

    async def open(self, namespace: bytes, arena: Arena) -> DiskSpace:
        """The namespace's slots: those that are there, and as many more as cap and disk allow.

        Raises OSError when not even one fits.
        """
        ...

    async def namespaces(self) -> Sequence[Stale]:
        """Everybody's files in the folder, least recently used first. Raises OSError."""
        ...

    async def remove(self, namespace: bytes) -> bool:
        """Removes a namespace's files; False: it is open. Raises OSError."""
        ...

    async def probe(self) -> Health:
        """Tries whether a degraded tier works again."""
        ...

    async def close(self) -> None:
        """Closes everything; files stay."""
        ...


class ObjectSpace(Protocol):
    """One namespace's blocks in remote storage, in aligned runs of `run_blocks`."""

    run_blocks: int

    def seen(self, keys: Sequence[bytes]) -> int:
        """How many of these, from the first on, were there when this node last knew; no I/O."""
        ...

    async def find(self, keys: Sequence[bytes], timeout_s: float) -> int:
        """How many leading blocks of a chain (from position 0 on) are there; by bisection."""
        ...

    async def store(self, run: Sequence[Transfer], timeout_s: float) -> Transferred:
        """Arena -> one object. `run` is one aligned run in chain order."""
        ...

    async def load(self, run: Sequence[Transfer], timeout_s: float) -> Transferred:
        """Object -> arena, verified in the arena; `run` is a leading part of one aligned run.

        Only `key` and `position` of their headers are known before; `Transferred.headers` has the
        rest.
        """
        ...

    async def erase(self, keys: Sequence[bytes]) -> None:
        """Deletes the runs that hold any of these blocks."""
        ...

    async def close(self) -> None:
        """Waits for what is moving, then lets go of the arena; objects stay."""
        ...


class ObjectTier(Protocol):
    """Remote storage (G4), shared by nodes."""

    place: str
    health: Health

    @property
    def backend(self) -> str:
        """What moves bytes at present, and why nothing better does."""
        ...

    async def open(self, namespace: bytes, arena: Arena) -> ObjectSpace:
        """The namespace's blocks; nothing is asked of the store yet."""
        ...

    async def probe(self) -> Health:
        """Tries whether it works."""
        ...

    async def close(self) -> None:
        """Closes connections."""
        ...
