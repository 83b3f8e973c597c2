"""The registry and its HTTP server."""

import urllib.request

import pytest
from prometheus_client import Counter

from services.common.errors import Unavailable
from services.common.telemetry.metrics import metrics_server, new_registry


def test_metrics_are_served_with_the_process_s_own() -> None:
    registry = new_registry()
    Counter("toys", "Toys made.", registry=registry).inc(3)
    with (
        metrics_server(registry, "127.0.0.1", 0) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer,
    ):
        text = answer.read().decode()
    assert "toys_total 3.0" in text and "process_cpu_seconds_total" in text


def test_registries_are_apart() -> None:
    for _ in range(2):
        Counter("toys", "Toys made.", registry=new_registry())


def test_a_taken_port_is_named() -> None:
    with (
        metrics_server(new_registry(), "127.0.0.1", 0) as port,
        pytest.raises(Unavailable, match=f"127.0.0.1:{port}") as caught,
        metrics_server(new_registry(), "127.0.0.1", port),
    ):
        pass
    assert caught.value.reason == "PORT_TAKEN"
