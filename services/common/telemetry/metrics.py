"""A process's Prometheus registry, and the small HTTP server that shows it.

Label values are bounded words (a worker id, a model, a reason), never tenants, keys or request ids.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)

from services.common.errors import Unavailable
from services.common.net import host_port


def new_registry() -> CollectorRegistry:
    """A registry with the process's own figures in it. Each process makes one and hands it on."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


@contextmanager
def metrics_server(registry: CollectorRegistry, host: str, port: int) -> Iterator[int]:
    """Serves /metrics in a thread; yields the port (`port` 0 picks a free one)."""
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as exc:
        raise Unavailable(
            f"metrics port {host_port(host, port)} can't be opened: {exc.strerror}",
            reason="PORT_TAKEN",
        ) from exc
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
