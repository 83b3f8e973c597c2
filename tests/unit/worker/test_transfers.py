"""Handles given and taken: whose KV it is, and of what prompt."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from services.common.cards import Holder
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.connector.transfer.params import decode, encode
from services.worker.core.model import Generation, Handle, Sampling
from services.worker.core.requests import RequestBook
from services.worker.engines.port import TransferNews
from services.worker.transfers import MOST_HANDED, Transfers

NONE = ("", "")
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
TOKENS = tuple(range(50))


def asked(**changes: object) -> Generation:
    generation = Generation("r", "att", "m", TOKENS, Sampling(max_tokens=5))
    return replace(generation, **changes)  # type: ignore[arg-type]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def worker(id: str, registry: CollectorRegistry | None = None, **changes: object) -> Transfers:
    fields: dict[str, object] = {"namespace": b"n" * 32, "way": "nixl", "lease_s": 12.0}
    metrics = WorkerMetrics(registry or CollectorRegistry())
    return Transfers(Holder(id, 1), metrics=metrics, **(fields | changes))  # type: ignore[arg-type]


def handle(adapter: tuple[str, str] = NONE, **changes: object) -> Handle:
    made = worker("p").give("1:att", asked(), TOKENS, adapter, PARAMS)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_what_one_gives_another_takes(registry: CollectorRegistry) -> None:
    made = handle()
    assert (made.source, made.tokens, made.expires_s, made.request_id) == ("p", 50, 12.0, "r")
    taken = worker("d", registry).take(asked(transfer=made), TOKENS, NONE)
    assert taken == PARAMS
    assert registry.get_sample_value("forebay_worker_transfers_total", {"result": "refused"}) == 0


@pytest.mark.parametrize(
    ("changes", "adapter"),
    [
        ({"namespace": b"o" * 32}, NONE),
        ({"way": "sim"}, NONE),
        ({"way": ""}, NONE),
        ({"source": "d"}, NONE),
        ({"params": b"\x81\xa1a\x01"}, NONE),
        ({"params": b"nonsense"}, NONE),
        ({}, ("sql", "/a/1")),
    ],
    ids=str,
)
def test_what_is_not_ours_is_computed(
    changes: dict[str, object], adapter: tuple[str, str], registry: CollectorRegistry
) -> None:
    transfers = worker("d", registry)
    assert transfers.take(asked(transfer=handle(**changes)), TOKENS, adapter) is None
    refused = {"result": "refused"}
    assert registry.get_sample_value("forebay_worker_transfers_total", refused) == 1


def test_another_version_of_an_adapter_is_another_adapter() -> None:
    made = handle(("sql", "/adapters/1111"))
    other, same = ("sql", "/adapters/2222"), ("sql", "/adapters/1111")
    assert worker("d").take(asked(transfer=made), TOKENS, other) is None
    assert worker("d").take(asked(transfer=made), TOKENS, same) == PARAMS


def test_another_prompt_or_salt_is_not_taken() -> None:
    d = worker("d")
    assert d.take(asked(transfer=handle()), (*TOKENS[:-1], 7), NONE) is None
    assert d.take(asked(transfer=handle(), cache_salt="other"), TOKENS, NONE) is None
    whole = Sampling(max_tokens=5, prompt_logprobs=0)
    assert d.take(asked(transfer=handle(), sampling=whole), TOKENS, NONE) is None
    assert d.take(asked(), TOKENS, NONE) is None


def test_releases_name_the_engines_request_once() -> None:
    p = worker("p")
    p.give("1:att", asked(), TOKENS, NONE, PARAMS)
    assert p.released("other") is None
    assert p.released("r") == "1:att"
    assert p.released("r") is None


def test_the_oldest_handles_are_forgotten() -> None:
    p = worker("p")
    for number in range(MOST_HANDED + 1):
        p.give(f"e{number}", asked(request_id=f"r{number}"), TOKENS[:1], NONE, {})
    assert p.released("r0") is None
    assert p.released("r1") == "e1"


def test_how_transfers_ended_is_counted(registry: CollectorRegistry) -> None:
    d = worker("d", registry)
    d.ended(TransferNews("x", 64, 4096, 0.02))
    d.ended(TransferNews("y", 0, 0, 2.0, "transport"))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"forebay_worker_{name}", labels)

    assert (
        value("transfers_total", result="taken") == value("transfers_total", result="failed") == 1
    )
    assert value("transfer_bytes_total") == 4096
    assert value("transfer_seconds_count") == 1


def test_parameters_survive_the_way() -> None:
    assert decode(encode(PARAMS, "d" * 32)) == ("d" * 32, PARAMS)


def test_what_does_not_come_is_to_be_computed() -> None:
    book = RequestBook()
    event = book.admit("1", "att", 100, 5, (), 0, 90)  # type: ignore[arg-type]
    assert event.transfer_tokens == 90
    assert book.pending_prefill_tokens() == 10
    book.untransferred("1")
    assert book.pending_prefill_tokens() == 100
    book.untransferred("unknown")
