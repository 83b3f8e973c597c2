"""The worker's shell and kvbm: look-ups at admission, and what their failures cost: nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forebay.worker.v1 import worker_pb2 as pb

from services.common.blocks import block_hashes
from services.common.errors import InvalidRequest
from services.worker.connector.terms import Terms, from_params
from services.worker.core.breaker import FAILURES
from services.worker.engines.port import EngineRequest, Step, TierNews
from tests.fakes.engine import FakeEngine
from tests.fakes.kvbm import FakeKvbm, Stored, serve_kvbm
from tests.integration.worker.test_worker import BLOCK, Rig, generate, request, rig
from tests.support.etcd import free_port
from tests.support.polling import until

LENGTH = 5 * BLOCK + 1


def keys(asked: pb.GenerateRequest) -> list[bytes]:
    return block_hashes(list(asked.prompt_token_ids), BLOCK)


def store(fake: FakeKvbm, hashes: list[bytes]) -> None:
    for slot, key in enumerate(hashes):
        fake.blocks[key] = Stored(key, slot, 3, 1000 + slot)


class Spy:
    """What the engine was told of each request's blocks."""

    def __init__(self, engine: FakeEngine) -> None:
        self.seen: list[Terms | None] = []
        submit = engine.submit

        def spied(request: EngineRequest) -> None:
            self.seen.append(from_params(request.kv))
            submit(request)

        engine.submit = spied  # type: ignore[method-assign]


async def counted(worker: Rig, outcome: str) -> float:
    name = f'forebay_worker_kvbm_lookups_total{{outcome="{outcome}"}}'
    return (await worker.metrics())[name]


async def test_what_kvbm_has_goes_to_the_engine_with_the_request(tmp_path: Path) -> None:
    fake = FakeKvbm(tmp_path)
    asked = request(length=LENGTH)
    store(fake, keys(asked)[:3])
    async with serve_kvbm(fake) as server, rig(kvbm=f"127.0.0.1:{server.port}") as worker:
        spy = Spy(worker.engine)
        await generate(worker, asked)
        (terms,) = spy.seen
        assert terms is not None and terms.lease is not None
        assert terms.lease.first == terms.assumed == 0
        assert [b.slot.index for b in terms.lease.ready] == [0, 1, 2]
        assert [b.checksums for b in terms.lease.ready] == [(1000,), (1001,), (1002,)]
        assert terms.stored == 3
        (lookup,) = fake.lookups
        assert list(lookup.keys) == keys(asked)
        assert lookup.namespace == worker.instance.card.namespace  # type: ignore[union-attr]
        assert await counted(worker, "hit") == 1


async def test_blocks_are_kept_on_the_account_of_the_request(tmp_path: Path) -> None:
    """The tenant goes with the question, and to the engine, which says it with each save."""
    fake = FakeKvbm(tmp_path)
    async with serve_kvbm(fake) as server, rig(kvbm=f"127.0.0.1:{server.port}") as worker:
        spy = Spy(worker.engine)
        asked = request(length=LENGTH)
        asked.tenant = "acme"
        await generate(worker, asked)
        assert fake.lookups[0].tenant == "acme"
        assert spy.seen[0] is not None and spy.seen[0].tenant == "acme"


async def test_what_the_engine_has_is_not_asked_for(tmp_path: Path) -> None:
    fake = FakeKvbm(tmp_path)
    async with serve_kvbm(fake) as server, rig(kvbm=f"127.0.0.1:{server.port}") as worker:
        spy = Spy(worker.engine)
        await generate(worker, request(length=LENGTH))
        await generate(worker, request(length=LENGTH))
        assert len(fake.lookups) == 1
        assert spy.seen[1] == Terms(assumed=5)
        longer = request(length=LENGTH + 2 * BLOCK)
        await generate(worker, longer)
        assert fake.lookups[1].skip_blocks == 5
        assert list(fake.lookups[1].keys) == keys(longer)
        await generate(worker, request(length=20))
        assert len(fake.lookups) == 2, "no full block, no question"
        assert await counted(worker, "needless") == 2
        assert await counted(worker, "miss") == 2


async def test_log_probabilities_of_a_prompt_load_nothing(tmp_path: Path) -> None:
    fake = FakeKvbm(tmp_path)
    async with serve_kvbm(fake) as server, rig(kvbm=f"127.0.0.1:{server.port}") as worker:
        await generate(worker, request(length=LENGTH, sampling={"prompt_logprobs": 1}))
        assert not fake.lookups


async def test_the_measured_rate_of_prompts_goes_into_the_question(tmp_path: Path) -> None:
    """P1: kvbm decides what beats computing."""
    fake = FakeKvbm(tmp_path)
    async with serve_kvbm(fake) as server, rig(kvbm=f"127.0.0.1:{server.port}") as worker:
        await generate(worker, request(length=LENGTH))
        assert fake.lookups[0].recompute_block_s == 0, "not known yet"
        news = TierNews({"prefill_tokens": 256.0}, "n")
        tell(worker, Step(worker.engine.progress, 0.5, tiers=news))
        await generate(worker, request(length=LENGTH, salt=5))
        assert fake.lookups[1].recompute_block_s == pytest.approx(BLOCK * 0.5 / 256)
        assert fake.lookups[1].wait_s == 0
        worker.engine.pause()
        waiting = asyncio.create_task(generate(worker, request("w", length=LENGTH, salt=6)))
        await until_seen(lambda: len(fake.lookups) == 3)
        await until_seen(lambda: bool(worker.engine._waiting))
        behind = asyncio.create_task(generate(worker, request("b", length=LENGTH, salt=7)))
        await until_seen(lambda: len(fake.lookups) == 4)
        assert fake.lookups[3].wait_s == pytest.approx(LENGTH * 0.5 / 256)
        worker.engine.resume()
        await asyncio.gather(waiting, behind)


def tell(worker: Rig, step: Step) -> None:
    worker.engine._on_step(step)


async def until_seen(probe: Callable[[], bool]) -> None:
    async def look() -> bool:
        return probe()

    await until(look, within_s=10)


async def test_a_slow_daemon_costs_its_deadline_a_few_times_and_then_nothing(
    tmp_path: Path,
) -> None:
    """H5: a miss, never an error, and no wait at all while the breaker is open."""
    fake = FakeKvbm(tmp_path)
    async with (
        serve_kvbm(fake) as server,
        rig(kvbm=f"127.0.0.1:{server.port}", kvbm_timeout_s=0.1) as worker,
    ):
        fake.delay_s = 5.0
        for n in range(FAILURES):
            began = time.monotonic()
            await generate(worker, request(length=LENGTH, salt=n))
            assert 0.09 < time.monotonic() - began < 1.0
        assert (await worker.metrics())["forebay_worker_kvbm_breaker_open"] == 1
        asked = fake.calls["Lookup"]
        began = time.monotonic()
        for n in range(5):
            await generate(worker, request(length=LENGTH, salt=10 + n))
        assert time.monotonic() - began < 1.0, "the breaker's pause was not used"
        assert fake.calls["Lookup"] == asked
        assert await counted(worker, "timeout") == FAILURES
        assert await counted(worker, "breaker") == 5
        fake.delay_s = 0.0

        async def again() -> bool:
            await generate(worker, request(length=LENGTH, salt=time.monotonic_ns() % 1900))
            return fake.calls["Lookup"] > asked

        await until(again, within_s=10, what="a trial")
        assert (await worker.metrics())["forebay_worker_kvbm_breaker_open"] == 0


async def test_no_daemon_is_a_miss_and_one_that_comes_back_is_used(tmp_path: Path) -> None:
    """H5: daemon away, then there."""
    port = free_port()
    fake = FakeKvbm(tmp_path)
    async with rig(kvbm=f"127.0.0.1:{port}") as worker:
        deltas = await generate(worker, request(length=LENGTH))
        assert deltas[-1].finish_reason == pb.FINISH_REASON_LENGTH
        assert await counted(worker, "failed") + await counted(worker, "timeout") == 1
        async with serve_kvbm(fake, port):

            async def asked() -> int:
                salt = time.monotonic_ns() % 1900
                await generate(worker, request(length=LENGTH, salt=salt))
                return len(fake.lookups)

            await until(asked, within_s=20, what="a look-up")


async def test_a_lease_of_a_request_that_is_refused_is_given_back(tmp_path: Path) -> None:
    """L1: looked up, never handed to an engine."""
    fake = FakeKvbm(tmp_path)
    asked = request(length=LENGTH)
    store(fake, keys(asked)[:3])
    async with serve_kvbm(fake) as server, rig(kvbm=f"127.0.0.1:{server.port}") as worker:

        def refuse(request: EngineRequest) -> None:
            raise InvalidRequest("the engine refuses it", field="prompt_token_ids")

        worker.engine.submit = refuse  # type: ignore[method-assign]
        with pytest.raises(InvalidRequest):
            await generate(worker, asked)
        await until_seen(lambda: bool(fake.reports))
        assert not fake.leases
        assert fake.reports[0].loaded_blocks == 0


async def test_leases_of_answers_that_nobody_waits_for_are_given_back(tmp_path: Path) -> None:
    """L1: the caller left during the look-up, or the answer came after its deadline."""
    fake = FakeKvbm(tmp_path)
    asked = request(length=LENGTH)
    store(fake, keys(asked)[:3])
    async with (
        serve_kvbm(fake) as server,
        rig(kvbm=f"127.0.0.1:{server.port}", kvbm_timeout_s=0.1) as worker,
    ):
        fake.delay_s = 0.3
        await generate(worker, asked)
        other = request("other", length=LENGTH, salt=9)
        store(fake, keys(other)[:2])
        call = worker.stub.Generate(other, timeout=20)
        await until_seen(lambda: fake.calls["Lookup"] == 2)
        call.cancel()
        await until_seen(lambda: len(fake.reports) == 2)
        assert not fake.leases
        assert await counted(worker, "timeout") == 1


async def test_the_record_names_the_daemon_once_the_engine_is_attached(tmp_path: Path) -> None:
    fake = FakeKvbm(tmp_path)
    async with serve_kvbm(fake) as server, rig(kvbm=f"127.0.0.1:{server.port}") as worker:
        assert worker.instance.kvbm == ""

        def says(node: str) -> Callable[[], bool]:
            return lambda: worker.instance.kvbm == node

        tell(worker, Step(1, tiers=TierNews({"saved_blocks": 3, "save_seconds": 0.5}, "node-7")))
        await until_seen(says("node-7"))
        metrics = await worker.metrics()
        assert metrics["forebay_worker_kvbm_attached"] == 1
        assert metrics['forebay_worker_kvbm_blocks_total{event="saved"}'] == 3
        assert metrics['forebay_worker_kvbm_copy_seconds_total{direction="save"}'] == 0.5
        tell(worker, Step(1, tiers=TierNews({"lost": 1})))
        tell(worker, Step(1, tiers=TierNews({}, "")))
        await until_seen(says(""))
        metrics = await worker.metrics()
        assert metrics["forebay_worker_kvbm_attached"] == 0
        assert metrics['forebay_worker_kvbm_events_total{event="lost"}'] == 1


async def test_an_engine_attached_before_it_serves_is_registered_so(tmp_path: Path) -> None:
    """What the connector said while the engine warmed up is not lost."""
    options = {"tiers": TierNews({}, "node-9")}
    async with rig(engine_options=options, kvbm="127.0.0.1:1") as worker:
        assert worker.discovery.registered_instances[0].kvbm == "node-9"
        assert len(worker.discovery.registered_instances) == 1


@pytest.mark.parametrize("value", ["nonsense", "unix:relative", ":9", "host:"])
def test_an_address_that_is_none_is_refused(value: str) -> None:
    from services.worker.config import WorkerSettings

    with pytest.raises(ValueError, match="kvbm"):
        WorkerSettings(model="m", kvbm=value)


def settings_of(value: str) -> Any:
    from services.worker.config import WorkerSettings

    return WorkerSettings(model="m", kvbm=value).kvbm


def test_addresses_may_be_sockets() -> None:
    assert settings_of("unix:/run/kvbm.sock") == "unix:/run/kvbm.sock"
    assert settings_of("node:8300") == "node:8300"
