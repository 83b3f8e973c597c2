"""Figures of several workers of one process on one page, told apart by the label `worker`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class WorkerFigures(Collector):
    """Registries by worker id, collected as one. Read by the metrics server's thread."""

    def __init__(self) -> None:
        self._registries: dict[str, CollectorRegistry] = {}

    def registry(self, worker: str) -> CollectorRegistry:
        """A new registry for a worker; an older one of that name is forgotten."""
        made = CollectorRegistry(auto_describe=True)
        self._registries[worker] = made
        return made

    def remove(self, worker: str) -> None:
        """Forgets a worker's figures."""
        self._registries.pop(worker, None)

    def describe(self) -> list[Metric]:
        """Nothing: names are known when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All figures, families of one name merged."""
        families: dict[str, Metric] = {}
        for worker, registry in list(self._registries.items()):
            for found in registry.collect():
                family = families.get(found.name)
                if family is None:
                    family = Metric(found.name, found.documentation, found.type)
                    families[found.name] = family
                family.samples.extend(
                    Sample(s.name, {**s.labels, "worker": worker}, s.value, s.timestamp, s.exemplar)
                    for s in found.samples
                )
        yield from families.values()
