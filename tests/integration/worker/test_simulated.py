"""A process of simulated workers on real gRPC and ZMQ: workers like others, faults on request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.simulator.v1 import simulator_pb2 as sim
from forebay.simulator.v1 import simulator_pb2_grpc
from forebay.worker.v1 import worker_pb2 as pb
from forebay.worker.v1 import worker_pb2_grpc

from services.common.blocks import block_keys
from services.common.cards import Instance
from services.common.events.model import (
    Batch,
    BlocksStored,
    LoadReport,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
)
from services.common.lifecycle import Lifecycle
from services.common.rpc.channel import open_channel
from services.worker import simulated
from services.worker.config import WorkerSettings
from tests.fakes.discovery import FakeDiscovery
from tests.support.polling import until
from tests.support.simulated import group, heard, snapshot

BLOCK = 16
FOREVER_S = 1e6


def request(length: int = 40, salt: int = 0, max_tokens: int = 8) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        attempt_id=f"a{salt}-{length}",
        prompt_token_ids=[3 + (salt * 131 + i) % 2000 for i in range(length)],
        sampling=pb.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
    )


async def generate(instance: Instance, message: pb.GenerateRequest) -> list[int]:
    async with open_channel(instance.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return [t async for d in stub.Generate(message, timeout=20) for t in d.delta.token_ids]


def kinds(batches: list[Batch]) -> list[type]:
    return [type(e) for b in batches for e in b.events if not isinstance(e, LoadReport)]


async def test_each_is_a_worker_of_its_own(tmp_path: Path) -> None:
    async with group(tmp_path) as g:
        found = [g.instance(f"w.{i}") for i in range(3)]
        assert len({i.address for i in found} | {i.events_address for i in found}) == 6
        assert len({i.incarnation for i in found}) == 3
        said = json.loads(g.ready_file.read_text())["instances"]
        assert said == [{"id": i.id, "incarnation": i.incarnation} for i in found]
        texts = [await generate(i, request()) for i in found]
        assert texts[0] == texts[1] == texts[2]
        assert len(texts[0]) == 8


async def test_it_says_that_it_is_a_simulator(tmp_path: Path) -> None:
    async with group(tmp_path, workers=2) as g:
        instance = g.instance("w.1")
        assert instance.labels["engine"] == "simulator"
        assert instance.card is not None and instance.card.engine.startswith("simulator")

        def read() -> str:
            with urllib.request.urlopen(f"http://{instance.metrics_address}/metrics") as answer:
                return str(answer.read().decode())

        await generate(instance, request())
        text = await asyncio.to_thread(read)
        assert 'forebay_worker_simulator{profile="h100/llama-3.1-8b",worker="w.1"} 1.0' in text
        assert 'forebay_worker_admitted_total{worker="w.0"} 0.0' in text
        assert 'forebay_worker_admitted_total{worker="w.1"} 1.0' in text
        assert text.count("# TYPE forebay_worker_admitted_total") == 1


async def test_its_events_are_those_of_a_worker(tmp_path: Path) -> None:
    async with group(tmp_path, workers=1) as g:
        instance = g.instance("w")
        async with heard(instance) as (batches, stats):
            message = request(5 * BLOCK + 3, max_tokens=2 * BLOCK)
            tokens = await generate(instance, message)

            async def finished() -> bool:
                return RequestFinished in kinds(batches)

            await until(finished, within_s=10, what="the end")
            life = [RequestAdmitted, RequestFirstToken, RequestFinished]
            assert [k for k in kinds(batches) if k in life] == life
            stored = [
                k for b in batches for e in b.events if isinstance(e, BlocksStored) for k in e.keys
            ]
            whole = [*message.prompt_token_ids, *tokens]
            # The last token is never computed: whoever asks for more computes it.
            assert stored == block_keys(whole[:-1], BLOCK)
            held = await snapshot(instance)
            assert {k for part in held.blocks for k in part.keys} == set(stored)
            # A heartbeat repeats the number of the batch before it.
            told = [b.sequence for b in batches if not b.is_heartbeat]
            assert told == list(range(told[0], told[0] + len(told)))
            assert stats.gaps == 0


async def test_one_that_dies_comes_back_under_another_incarnation(tmp_path: Path) -> None:
    faults = [{"kind": "die", "workers": [1]}]
    async with group(tmp_path, workers=2, sim_faults=faults) as g:

        async def again() -> bool:
            return len(g.lives("w.1")) == 2

        await until(again, within_s=20, what="a second life")
        assert len(await generate(g.instance("w.1"), request())) == 8
        assert len(g.lives("w.0")) == 1


@pytest.mark.parametrize("kind", ["drop", "lie"])
async def test_lost_batches_leave_a_hole_and_lies_do_not(tmp_path: Path, kind: str) -> None:
    faults = [{"kind": kind, "share": 0.5}]
    async with group(tmp_path, workers=1, sim_faults=faults) as g:
        instance = g.instance("w")
        async with heard(instance) as (batches, stats):
            for salt in range(12):
                await generate(instance, request(3 * BLOCK + 1, salt))

            async def hole() -> bool:
                return stats.gaps > 0

            async def quiet() -> bool:
                return batches[-1].sequence >= (await snapshot(instance)).sequence

            if kind == "drop":
                await until(hole, within_s=10, what="a hole")
                return
            await until(quiet, within_s=10, what="the last batch")
            held = {k for part in (await snapshot(instance)).blocks for k in part.keys}
            stored = (e for b in batches for e in b.events if isinstance(e, BlocksStored))
            assert {k for e in stored for k in e.keys} < held
            assert stats.gaps == 0


async def test_a_stalled_one_ends_no_step_and_a_slow_one_takes_longer(tmp_path: Path) -> None:
    faults = [
        {"kind": "stall", "for_s": FOREVER_S, "workers": [0]},
        {"kind": "slow", "factor": 50, "workers": [1]},
    ]
    async with group(tmp_path, sim_faults=faults, drain_timeout_s=0.1) as g:
        stalled = asyncio.create_task(generate(g.instance("w.0"), request()))
        assert len(await generate(g.instance("w.2"), request(max_tokens=20))) == 20
        loop = asyncio.get_running_loop()
        began = loop.time()
        await generate(g.instance("w.1"), request(max_tokens=20))
        # 20 steps of 50 x 8 ms at a speedup of 20; at full speed they take 8 ms.
        assert loop.time() - began > 0.3
        assert not stalled.done()
        stalled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stalled


async def test_faults_are_set_off_by_hand_too(tmp_path: Path) -> None:
    async with group(tmp_path, workers=1, drain_timeout_s=0.1) as g:
        first = g.instance("w")
        async with open_channel(first.address) as channel:
            stub: Any = simulator_pb2_grpc.SimulatorServiceStub(channel)

            async def inject(**fault: Any) -> None:
                await stub.InjectFault(sim.InjectFaultRequest(**fault), timeout=5)

            for wrong in ({}, {"kind": sim.FAULT_KIND_DROP, "share": 2}, {"kind": 99}):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await inject(**wrong)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await inject(kind=sim.FAULT_KIND_STALL, duration_s=FOREVER_S)
            stalled = asyncio.create_task(generate(first, request()))
            async with heard(first) as (batches, _):

                async def admitted() -> bool:
                    held = await snapshot(first)
                    return bool(held.requests)

                await until(admitted, within_s=10, what="a request that waits")
                assert RequestFirstToken not in kinds(batches)
            assert not stalled.done()
            await inject(kind=sim.FAULT_KIND_DIE)

        async def again() -> bool:
            return len(g.lives("w")) == 2

        await until(again, within_s=20, what="a second life")
        with pytest.raises(grpc.aio.AioRpcError):
            await stalled
        assert len(await generate(g.instance("w"), request())) == 8


@pytest.mark.parametrize("model", ["/nowhere", "org/unknown"])
async def test_a_folder_that_is_none_stops_the_start(model: str) -> None:
    from services.worker.errors import EngineStartError

    with pytest.raises(EngineStartError, match=r"config\.json"):
        await simulated.main(
            WorkerSettings(model=model, engine="sim"), Lifecycle(), registrar=FakeDiscovery()
        )
