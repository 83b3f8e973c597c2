"""A worker as a process with real vLLM: how it starts, refuses to start, and dies."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from forebay.worker.v1 import worker_pb2 as pb
from forebay.worker.v1 import worker_pb2_grpc

from services.common.rpc.channel import open_channel
from tests.support.polling import until
from tests.support.processes import Process, Ready

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
START_S = 240


def start(folder: Path, model: Path, *flags: str) -> Process:
    argv = [sys.executable, "-m", "services.worker", "--model", str(model), "--dtype", "float32"]
    ports = ["--port", "0", "--events-port", "0", "--metrics-port", "0"]
    # Nobody listens there: a worker serves without etcd, too.
    etcd = ["--etcd-endpoints", "127.0.0.1:1"]
    process = Process("worker", [*argv, *ports, *etcd, *flags], folder)
    process.argv += ["--ready-file", str(process.ready_file)]
    process.start()
    return process


@asynccontextmanager
async def running(folder: Path, model: Path, *flags: str) -> AsyncIterator[tuple[Process, Ready]]:
    process = start(folder, model, *flags)
    try:
        yield process, await process.until_ready(START_S)
    finally:
        process.close()


def family(pid: int) -> list[psutil.Process]:
    """Engine processes below a worker."""
    children = psutil.Process(pid).children(recursive=True)
    return [p for p in children if "VLLM" in " ".join(p.cmdline())]


async def gone(processes: list[psutil.Process]) -> None:
    async def left() -> list[psutil.Process]:
        return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    await until(left, lambda rest: not rest, within_s=15, what="end of all engine processes")


async def test_a_killed_engine_ends_its_requests_and_the_process(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    async with running(tmp_path, tiny_model_path, "--engine-mode", "async") as (process, ready):
        engines = family(ready.pid)
        assert engines
        async with open_channel(ready.address) as channel:
            stream = worker_pb2_grpc.WorkerServiceStub(channel).Session()
            await stream.write(pb.SessionRequest(open=pb.SessionOpen(gateway_id="g")))
            sampling = pb.SamplingParams(max_tokens=8000, temperature=0, ignore_eos=True)
            asked = pb.GenerateRequest(
                request_id="a", prompt_token_ids=[5, 6, 7], sampling=sampling
            )
            await stream.write(pb.SessionRequest(generate=asked))
            await asyncio.wait_for(stream.read(), 30)
            engines[0].kill()
            last = None
            while last is None or not last.finish_reason:
                frame = await asyncio.wait_for(stream.read(), 30)
                assert frame is not grpc.aio.EOF, "the stream ended without the request's end"
                last = frame.deltas[0]
            assert (last.error.reason, last.error.code) == ("ENGINE_DEAD", 14)
        assert await process.until_ended(30) == 1
        await gone(engines)


async def test_a_killed_worker_takes_its_engine_along(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    async with running(tmp_path, tiny_model_path, "--engine-mode", "async") as (process, ready):
        engines = family(ready.pid)
        assert engines
        process.kill()
        await gone(engines)


async def test_an_unknown_engine_argument_stops_the_start(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    process = start(tmp_path, tiny_model_path, "--engine-args", '{"max_num_seq": 3}')
    assert await process.until_ended(120) == 1
    assert "did you mean 'max_num_seqs'" in process.log_text()


async def test_a_stop_while_starting_is_a_clean_end(tmp_path: Path, tiny_model_path: Path) -> None:
    process = start(tmp_path, tiny_model_path, "--engine-log-level", "info")

    async def loading() -> bool:
        return "Initializing a V1 LLM engine" in process.log_text()

    await until(loading, within_s=120, what="start of vLLM", every_s=0.1)
    process.terminate()
    assert await process.until_ended(60) == 0
