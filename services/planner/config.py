"""What a planner can be told."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from services.common.settings import ServiceSettings, StrList, settings_config
from services.planner.core.policy import PolicyConfig
from services.planner.core.targets import Targets
from services.planner.core.watch import WatchConfig

_POLICY = PolicyConfig()
_WATCH = WatchConfig()


class PlannerSettings(ServiceSettings):
    """Settings of one planner. Pressures are ratios, 1 is the target (services/planner/core)."""

    service: ClassVar[str] = "planner"
    model_config = settings_config("planner")

    port: int = Field(default=8400, ge=0, le=65535)
    """Port of the gRPC server (health and reflection); 0 picks a free one."""
    metrics_port: int = Field(default=8401, ge=0, le=65535)
    """Port of /metrics; 0 picks a free one."""
    ttft_s: float = Field(default=2.0, gt=0)
    """Target for the time to first token in seconds, from a worker's admission on."""
    itl_ms: float = Field(default=50.0, gt=0)
    """Target for a request's mean time between tokens, in milliseconds."""
    quantile: float = Field(default=0.9, gt=0, lt=1)
    """Share of requests that shall keep each target."""
    models: StrList = ()
    """Models whose workers are moved, with commas between; empty: all."""
    dry_run: bool = False
    """Decide, log and count, but move nothing."""
    interval_s: float = Field(default=1.0, gt=0)
    """Seconds between two decisions."""
    window_s: float = Field(default=_WATCH.window_s, gt=0)
    """Seconds over which rates and latencies are measured."""
    hold: int = Field(default=_POLICY.hold, ge=1)
    """Decisions in a row that must find a side pressed before a worker moves."""
    gap_s: float = Field(default=_POLICY.gap_s, ge=0)
    """Least seconds between two changes of roles among the workers of a model."""
    high: float = Field(default=_POLICY.high, gt=0, le=1)
    """Pressure above which a side is short of workers."""
    low: float = Field(default=_POLICY.low, gt=0, le=1)
    """A side gives a worker if its pressure stays at most this, ..."""
    gain: float = Field(default=_POLICY.gain, gt=0, lt=1)
    """... or at most this share of the pressed side's, ..."""
    most: float = Field(default=_POLICY.most, gt=0, le=1)
    """... and never if it would be more than this."""
    prefill_use: float = Field(default=_POLICY.prefill_use, gt=0, le=1)
    """Share of the prefill rate in use that counts as a pressure of 1."""
    kv_use: float = Field(default=_POLICY.kv_use, gt=0, le=1)
    """Share of KV blocks in use by requests that counts as a pressure of 1."""
    set_role_timeout_s: float = Field(default=5.0, gt=0)
    """Deadline of one SetRole call, in seconds."""
    refused_s: float = Field(default=_POLICY.refused_s, ge=0)
    """Seconds for which a worker that did not take its new role is left alone."""
    silent_after_s: float = Field(default=_WATCH.silent_after_s, gt=0)
    """Seconds of silence after which a worker counts nowhere; its heartbeat comes every 0.25 s."""
    gone_after_s: float = Field(default=_WATCH.gone_after_s, gt=0)
    """Seconds of silence after which a worker without a record is forgotten."""
    snapshots_at_once: int = Field(default=4, ge=1)
    """Most snapshots fetched at a time."""
    snapshot_timeout_s: float = Field(default=5.0, gt=0)
    """Deadline of one Snapshot call, in seconds."""

    @model_validator(mode="after")
    def _bands(self) -> Self:
        if self.low >= self.high:
            raise ValueError(
                f"low ({self.low:g}) must be below high ({self.high:g}): between them nothing moves"
            )
        return self

    def targets(self) -> Targets:
        """What is to be held."""
        return Targets(self.ttft_s, self.itl_ms / 1e3, self.quantile)

    def watch_config(self) -> WatchConfig:
        """How far back figures reach."""
        return WatchConfig(self.window_s, self.silent_after_s, self.gone_after_s)

    def policy_config(self) -> PolicyConfig:
        """When to move."""
        return PolicyConfig(
            high=self.high,
            low=self.low,
            gain=self.gain,
            most=self.most,
            hold=self.hold,
            gap_s=self.gap_s,
            prefill_use=self.prefill_use,
            kv_use=self.kv_use,
            refused_s=self.refused_s,
        )
