"""What the client of kvbm tells the scheduler's side, and what an engine says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.arena import Geometry
from services.worker.connector.model import Attachment, LeasedBlock
from services.worker.connector.terms import Terms


@dataclass(frozen=True, slots=True)
class Hello:
    """What an engine says of itself when it attaches."""

    namespace: bytes
    geometry: Geometry
    worker: str = ""
    model: str = ""
    g1_bytes: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Attached:
    """The daemon took us; the worker side must lock and map before slots are granted."""

    attachment: Attachment
    node: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The attachment is void."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of fills: by key, whether the block needs no save any more."""

    results: dict[bytes, bool]


@dataclass(frozen=True, slots=True)
class Promoted:
    """State of a lease's promotions; `ready` None: nothing more will be heard."""

    request: str
    lease: int
    ready: tuple[LeasedBlock, ...] | None
    promoting: int


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to an Ask; `terms` None: there was none."""

    request: str
    terms: Terms | None


News = Attached | Gone | Committed | Promoted | Found
