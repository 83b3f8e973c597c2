"""What a router can be told."""

from typing import ClassVar

from pydantic import Field

from services.common.settings import ServiceSettings, settings_config
from services.router.core.cost import CostModel
from services.router.core.lives import Liveness
from services.router.core.onboard import OnboardDefaults
from services.router.core.placement import CoreConfig
from services.router.core.policies import PolicyName
from services.router.core.rates import RateDefaults


class RouterSettings(ServiceSettings):
    """Settings of one router; the weights are pure numbers (services/router/core/cost.py)."""

    service: ClassVar[str] = "router"
    model_config = settings_config("router")

    port: int = Field(default=8100, ge=0, le=65535)
    """Port of the gRPC server; 0 picks a free one."""
    metrics_port: int = Field(default=8101, ge=0, le=65535)
    """Port of /metrics; 0 picks a free one."""
    policy: PolicyName = PolicyName.KV
    """kv, round-robin, random or least-loaded."""
    seed: int = 0
    """Seed of the generator that breaks ties; 0 takes a random one."""
    own_weight: float = Field(default=1.0, ge=0)
    """How much more than once a request's own recompute counts."""
    space_weight: float = Field(default=0.03, ge=0)
    """Price of a prompt token in use at a worker, as a share of computing it."""
    crowd_weight: float = Field(default=0.25, ge=0)
    """Price of each request in flight that shares the prompt, as a share of computing it."""
    context_tokens: float = Field(default=65536.0, gt=0)
    """Context at which attention doubles the cost of a prefilled token, in tokens."""
    prefill_tokens_per_s: float = Field(default=4000.0, gt=0)
    """Prefill rate of workers before it is measured, in tokens a second."""
    decode_tokens: float = Field(default=16.0, ge=0)
    """A running decode weighs like this many prompt tokens ahead."""
    g2_speedup: float = Field(default=10.0, gt=0)
    """How many times as fast as computing it host memory brings a block up, until measured."""
    g3_speedup: float = Field(default=3.0, gt=0)
    """The same for local disk."""
    g4_speedup: float = Field(default=1.5, gt=0)
    """The same for remote storage."""
    node_blocks: int = Field(default=1 << 20, ge=1)
    """Most blocks of one kvbm daemon that are indexed, each about 100 bytes; more are ignored."""
    prefetch: bool = True
    """Whether kvbm daemons are told to bring up what a placed request will want."""
    learn_rates: bool = True
    """Whether prefill rates are learned from events."""
    booking_ttl_s: float = Field(default=10.0, gt=0)
    """Seconds that a placement counts as load before its worker confirms it."""
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

    def core_config(self) -> CoreConfig:
        """The part that the core needs."""
        return CoreConfig(
            policy=self.policy,
            cost=CostModel(
                own_weight=self.own_weight,
                context_tokens=self.context_tokens,
                space_weight=self.space_weight,
                crowd_weight=self.crowd_weight,
            ),
            rates=RateDefaults(
                prefill_tokens_per_s=self.prefill_tokens_per_s,
                decode_tokens=self.decode_tokens,
                learn=self.learn_rates,
            ),
            onboard=OnboardDefaults(self.g2_speedup, self.g3_speedup, self.g4_speedup),
            node_blocks=self.node_blocks,
            liveness=Liveness(self.suspect_after_s, self.gone_after_s),
            booking_ttl_s=self.booking_ttl_s,
        )
