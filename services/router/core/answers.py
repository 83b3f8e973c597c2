"""What the router core is asked and what it answers, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from services.common.events.model import Tier, TierRate
from services.common.ids import AttemptId
from services.router.core.cost import Candidate, Score
from services.router.core.index import Digest
from services.router.core.lives import Status
from services.router.core.peers import PeerHint
from services.router.core.policies import PolicyName
from services.router.core.requests import LoadView
from services.router.core.workers import HolderId, WorkerInfo, WorkerRole


@dataclass(frozen=True, slots=True)
class Query:
    """A request to be placed. `keys` are those of its full blocks of `block_size` tokens."""

    model: str
    """Model or adapter name."""
    prompt_tokens: int
    keys: Sequence[int]
    block_size: int
    excluded: frozenset[str] = frozenset()
    """Worker ids that will not do."""
    pinned: str = ""
    """If set, the only worker id that will do."""
    rank: int | None = None
    """If set, the only data-parallel rank that will do."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels a worker must carry."""
    tenant: str = ""
    """On whose account it waits; one with workers of its own is served by these alone."""
    session: str = ""
    """Requests of one session shall go to one worker; empty: of none."""
    sequences: int = 1
    """Sequences that will run on the placement."""
    priority: int = 0
    """Higher goes first where requests wait."""
    patience_s: float = float("inf")
    """Seconds that its client waits on."""
    admitted: bool = False
    """Whether it has had its turn: it is placed at once, whatever the wait."""
    whole: bool = False
    """Whether one worker shall do all of it."""


class Bar(StrEnum):
    """Why a worker is not in choice for a request."""

    OTHER_MODEL = "serves another model"
    OTHER_BLOCK_SIZE = "has another block size"
    TOO_LONG = "its context is too short for the prompt"
    PREFILL_ONLY = "only prefills, and others are there"
    DRAINING = "is draining"
    UNREACHABLE = "refused a connection"
    EXCLUDED = "excluded by the request"
    NOT_PINNED = "the request is pinned to another worker"
    OTHER_RANK = "the request is pinned to another data-parallel rank"
    OTHER_TENANTS = "is reserved for other tenants"
    NOT_RESERVED = "the request's tenant has workers of its own"
    LABELS = "lacks a label that the request asks for"
    SUSPECT = "silent, and others are there"
    STARTING = "starts anew, and others are there"


class RefusalKind(StrEnum):
    """Kinds of refusal."""

    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    NO_WORKER = "NO_WORKER"
    WRONG_BLOCK_SIZE = "WRONG_BLOCK_SIZE"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    OVERLOADED = "OVERLOADED"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no placement; `message` is for people."""

    kind: RefusalKind
    message: str
    wait_s: float = 0.0
    """OVERLOADED: predicted seconds until its prefill would begin."""
    retry_s: float = 0.0
    """OVERLOADED: predicted seconds until it would be placed at once."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What keeps the workers busy that a request could run on."""

    wait_s: float
    """Predicted seconds until one of them begins something new."""
    tokens_per_s: float
    """How fast all of them together prefill."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Blocks not in a daemon's G2 that it will be asked for soon: a hint to bring them there."""

    node: str
    """Id of the daemon."""
    namespace: bytes
    keys: Sequence[int]
    """In chain order, from the first one that is below G2 on."""
    peers: tuple[PeerHint, ...] = ()
    """Other nodes that hold some of them."""
    recompute_block_s: float = 0.0
    """Seconds that the worker takes to compute one; 0: not known."""


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """What another worker does of a request first; booked under an attempt id of its own."""

    attempt_id: AttemptId
    holder: HolderId
    address: str
    predicted_cached_tokens: int
    """Prompt tokens that its worker's engine will report as cached."""
    transfer_tokens: int
    """Prompt tokens whose KV will travel."""
    transfer_s: float
    """Predicted seconds for that."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision, booked under its attempt id."""

    attempt_id: AttemptId
    holder: HolderId
    address: str
    predicted_cached_tokens: int
    """Prompt tokens that the worker's engine will report as cached; those not counted whose KV
    another one hands over.
    """
    predicted_ttft_s: float
    """0 when the policy predicts none and one worker does all of it."""
    policy: PolicyName
    score: Score
    prefetch: Prefetch | None = None
    """What the daemon of the worker that prefills should bring up meanwhile."""
    prefill: PrefillLeg | None = None
    """Who prefills, if that is another worker."""

    @property
    def attempt_ids(self) -> tuple[AttemptId, ...]:
        """Of all its parts."""
        return (self.attempt_id, self.prefill.attempt_id) if self.prefill else (self.attempt_id,)


@dataclass(frozen=True, slots=True)
class Scored:
    """How one worker fared. `candidate` and `score` are None for those not in choice."""

    holder: HolderId
    role: WorkerRole
    candidate: Candidate | None = None
    score: Score | None = None
    chosen: bool = False
    bar: Bar | None = None
    reason: str = ""
    """Why it was not chosen, for people."""


@dataclass(frozen=True, slots=True)
class PathScore:
    """One way to serve a request, in seconds (apart.py). Without holders: there is no such way."""

    holder: HolderId | None = None
    """Who decodes."""
    prefill: HolderId | None = None
    """Who prefills, if that is another one."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_queue_s: float = 0.0
    stall_s: float = 0.0
    total_s: float = 0.0
    chosen: bool = False
    reason: str = ""
    """Why it was not chosen, or does not exist, for people."""


@dataclass(frozen=True, slots=True)
class Scorecard:
    """All workers for one request, best first, those not in choice last."""

    policy: PolicyName
    prompt_tokens: int
    prompt_blocks: int
    workers: tuple[Scored, ...]
    whole: PathScore | None = None
    """All of it on one worker; None: nobody can take it."""
    apart: PathScore | None = None
    """Prefill and decode apart; None: no worker has the role of prefill."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request (or leg of one) that this router placed went: what was predicted, what the
    engine did. Tokens whose KV another worker handed over are counted nowhere here.
    """

    holder: HolderId
    attempt_id: AttemptId
    prompt_tokens: int
    predicted_cached_tokens: int
    cached_tokens: int


class TransferResult(StrEnum):
    """How KV that was to go from one worker to another fared."""

    CAME = "came"
    FAILED = "failed"
    """It did not arrive, or not as it was sent."""
    MISSED = "missed"
    """This router had planned it, and the request came to its worker without."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer of KV that is over, whoever decided it."""

    result: TransferResult
    source: str
    holder: HolderId
    """Who was to get it."""
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    predicted_s: float | None = None
    """None: another router decided it."""


Report = Outcome | Transfer
"""What a worker's news say of decisions that were taken before."""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker's rank as the router sees it."""

    info: WorkerInfo
    holder: HolderId
    status: Status
    load: LoadView
    indexed_blocks: int
    sequence: int
    silence_s: float
    placements: int
    prompt_tokens: int
    """Sum over its finished requests since this router started; so is `cached_tokens`."""
    cached_tokens: int
    prefill_rate: float
    has_record: bool


@dataclass(frozen=True, slots=True)
class TierView:
    """What a daemon has of one namespace in one tier, and how fast that comes up, if measured."""

    namespace: bytes
    tier: Tier
    digest: Digest
    rate: TierRate | None


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """A kvbm daemon as the router sees it."""

    id: str
    incarnation: int
    address: str
    status: Status
    tiers: tuple[TierView, ...]
    entries: int
    """Index entries: a block in several tiers is one."""
    sequence: int
    silence_s: float


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Figures of the index. Digests are of G1, with the sequence up to which they hold.

    Entries and capacity are of G1 as well; those of daemons are apart.
    """

    blocks: int
    entries: int
    capacity_entries: int
    refused_entries: int
    events: int
    unknown_events: int
    digests: tuple[tuple[HolderId, int, Digest], ...]
    tier_entries: int = 0
    """Blocks times daemons that hold them below G1."""
    tier_capacity_entries: int = 0
    tier_refused_entries: int = 0
    drifts: int = 0
    """Times so far that a publisher's digest differed from what was known of it."""
