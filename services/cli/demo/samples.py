"""What the offload demonstration saw of the tiers at one moment. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.cli.adapters.kvbm import NodeStats


@dataclass(frozen=True, slots=True)
class Sample:
    """Blocks in each tier, and blocks moved so far."""

    at_s: float
    """Seconds after the first visit was due."""
    g1: int
    g2: int
    g3: int
    offload_g1_g2: int
    offload_g2_g3: int
    onboard_g2_g1: int
    """Loaded into the engine from where they lay in host memory."""
    onboard_g3_g1: int
    """Loaded into the engine after they were read from disk."""

    @property
    def moved(self) -> tuple[int, int, int, int]:
        """All counters."""
        return self.offload_g1_g2, self.offload_g2_g3, self.onboard_g2_g1, self.onboard_g3_g1

    def since(self, first: "Sample") -> "Sample":
        """With what was moved after `first` only."""
        return replace(
            self,
            offload_g1_g2=self.offload_g1_g2 - first.offload_g1_g2,
            offload_g2_g3=self.offload_g2_g3 - first.offload_g2_g3,
            onboard_g2_g1=self.onboard_g2_g1 - first.onboard_g2_g1,
            onboard_g3_g1=self.onboard_g3_g1 - first.onboard_g3_g1,
        )


def sample_of(at_s: float, worker: Mapping[str, float], stats: NodeStats) -> Sample:
    """From a worker's metrics and the daemon's figures."""
    tiers = {t.tier: t.blocks for t in stats.tiers}

    def counter(name: str) -> int:
        return int(stats.counters.get(name, 0))

    # All blocks reach the engine from host memory; those from disk were brought there before.
    from_disk = counter("onboard_blocks_d2d")

    return Sample(
        at_s=at_s,
        g1=int(worker.get("forebay_worker_cached_blocks", 0)),
        g2=tiers.get("g2", 0),
        g3=tiers.get("g3", 0),
        offload_g1_g2=counter("offload_blocks_d2h"),
        offload_g2_g3=counter("offload_blocks_h2d"),
        onboard_g2_g1=max(0, counter("onboard_blocks_h2d") - from_disk),
        onboard_g3_g1=from_disk,
    )
