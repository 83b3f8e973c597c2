"""What a router can be told."""

from typing import ClassVar

from pydantic import Field

from services.common.settings import ServiceSettings, settings_config
from services.router.core.admission import AdmissionConfig
from services.router.core.apart import ApartConfig, Disagg
from services.router.core.cost import CostModel
from services.router.core.lives import Liveness
from services.router.core.onboard import OnboardDefaults
from services.router.core.placement import CoreConfig
from services.router.core.policies import PolicyName
from services.router.core.rates import RateDefaults
from services.router.core.transfers import TransferDefaults

_COST = CostModel()
_ADMISSION = AdmissionConfig()
_APART = ApartConfig()
_TRANSFERS = TransferDefaults()


class RouterSettings(ServiceSettings):
    """Settings of one router; the weights are pure numbers (services/router/core/cost.py)."""

    service: ClassVar[str] = "router"
    model_config = settings_config("router")

    port: int = Field(default=8100, ge=0, le=65535)
    """Port of the gRPC server; 0 picks a free one."""
    metrics_port: int = Field(default=8101, ge=0, le=65535)
    """Port of /metrics; 0 picks a free one."""
    policy: PolicyName = PolicyName.KV
    """kv, round-robin, random or least-loaded; to compare with: p2c, sticky, dynamo, lmetric."""
    seed: int = 0
    """Seed of the generator that breaks ties; 0 takes a random one."""
    own_weight: float = Field(default=_COST.own_weight, ge=0)
    """How much more than once it counts to compute what another worker holds."""
    churn_weight: float = Field(default=_COST.churn_weight, ge=0)
    """Price of a computed token where the cache is refilled twice as fast as elsewhere."""
    space_weight: float = Field(default=_COST.space_weight, ge=0)
    """Price of a prompt token in use at a worker, as a share of computing it."""
    crowd_weight: float = Field(default=_COST.crowd_weight, ge=0)
    """Price of each request in flight that shares the prompt, as a share of computing it, ..."""
    free_mates: float = Field(default=_COST.free_mates, ge=0)
    """... beyond so many."""
    repeat_weight: float = Field(default=_COST.repeat_weight, ge=0)
    """Price of what requests that share a prefix had computed at a worker beyond its share."""
    dynamo_weight: float = Field(default=1.0, ge=0)
    """Weight of prefill blocks beside active ones in the policy `dynamo`."""
    context_tokens: float = Field(default=65536.0, gt=0)
    """Context at which attention doubles the cost of a prefilled token, in tokens."""
    prefill_tokens_per_s: float = Field(default=4000.0, gt=0)
    """Prefill rate of workers before it is measured, in tokens a second."""
    decode_tokens: float = Field(default=16.0, ge=0)
    """For so many tokens the running decodes count that a request slows down."""
    g2_speedup: float = Field(default=10.0, gt=0)
    """How many times as fast as computing it host memory brings a block up, until measured."""
    g3_speedup: float = Field(default=3.0, gt=0)
    """The same for local disk."""
    g4_speedup: float = Field(default=1.5, gt=0)
    """The same for remote storage."""
    peer_speedup: float = Field(default=2.0, gt=0)
    """The same for the memory of other nodes."""
    node_blocks: int = Field(default=1 << 20, ge=1)
    """Most blocks of one kvbm daemon that are indexed, each about 100 bytes; more are ignored."""
    prefetch: bool = True
    """Whether kvbm daemons are told to bring up what a placed request will want."""
    learn_rates: bool = True
    """Whether rates of prefills, decodes and transfers are learned from events."""
    disagg: Disagg = Disagg.AUTO
    """When one worker prefills and another decodes: auto (if it pays), always, or never."""
    disagg_min_tokens: int = Field(default=_APART.min_tokens, ge=0)
    """Requests with fewer prompt tokens to compute are never prefilled by another worker."""
    stall_weight: float = Field(default=_APART.stall_weight, ge=0)
    """Price of a second by which a prefill holds up each decode that runs beside it, in seconds."""
    handover_s: float = Field(default=_APART.handover_s, ge=0)
    """Seconds between the end of a prefill and the begin of its transfer to the decode worker."""
    transfer_latency_s: float = Field(default=_TRANSFERS.latency_s, ge=0)
    """Seconds before the first KV of a transfer between workers arrives, until measured."""
    transfer_tokens_per_s: float = Field(default=_TRANSFERS.tokens_per_s, gt=0)
    """Prompt tokens whose KV gets from one worker to another in a second, until measured."""
    session_wait_s: float = Field(default=1.0, ge=0)
    """A session stays with its worker unless another's first token comes sooner by more seconds."""
    session_ttl_s: float = Field(default=3600.0, gt=0)
    """Seconds for which a session is remembered after its last request."""
    booking_ttl_s: float = Field(default=10.0, gt=0)
    """Seconds that a placement counts as load before its worker confirms it."""
    max_wait_s: float = Field(default=_ADMISSION.max_wait_s, ge=0)
    """Requests wait at the router while every worker has this many seconds of prefill ahead; 0:
    they never do."""
    queue_length: int = Field(default=_ADMISSION.queue_length, ge=0, le=16384)
    """Most requests that wait at the router; more are refused, or displace some."""
    queue_wait_s: float = Field(default=_ADMISSION.queue_wait_s, ge=0)
    """Longest that one waits there, in seconds; who would wait longer is refused at once."""
    suspect_after_s: float = Field(default=1.0, gt=0)
    """Seconds of silence after which a worker is avoided; its heartbeat comes every 0.25 s."""
    gone_after_s: float = Field(default=30.0, gt=0)
    """Seconds of silence after which a worker without a record is forgotten."""
    snapshots_at_once: int = Field(default=4, ge=1)
    """Most snapshots fetched at a time."""
    snapshot_timeout_s: float = Field(default=5.0, gt=0)
    """Deadline of one Snapshot call, in seconds."""
    discovery_grace_s: float = Field(default=5.0, ge=0)
    """Seconds to wait for etcd at start; after that the router serves what it knows."""

    def admission_config(self) -> AdmissionConfig:
        """The limits on waiting."""
        return AdmissionConfig(self.max_wait_s, self.queue_length, self.queue_wait_s)

    def core_config(self) -> CoreConfig:
        """The part that the core needs."""
        return CoreConfig(
            policy=self.policy,
            cost=CostModel(
                own_weight=self.own_weight,
                churn_weight=self.churn_weight,
                space_weight=self.space_weight,
                crowd_weight=self.crowd_weight,
                free_mates=self.free_mates,
                repeat_weight=self.repeat_weight,
                decode_tokens=self.decode_tokens,
            ),
            dynamo_weight=self.dynamo_weight,
            rates=RateDefaults(
                prefill_tokens_per_s=self.prefill_tokens_per_s,
                context_tokens=self.context_tokens,
                learn=self.learn_rates,
            ),
            onboard=OnboardDefaults(
                self.g2_speedup, self.g3_speedup, self.g4_speedup, self.peer_speedup
            ),
            apart=ApartConfig(
                self.disagg, self.stall_weight, self.disagg_min_tokens, self.handover_s
            ),
            transfers=TransferDefaults(
                self.transfer_latency_s, self.transfer_tokens_per_s, self.learn_rates
            ),
            node_blocks=self.node_blocks,
            liveness=Liveness(self.suspect_after_s, self.gone_after_s),
            session_wait_s=self.session_wait_s,
            session_ttl_s=self.session_ttl_s,
            booking_ttl_s=self.booking_ttl_s,
        )
