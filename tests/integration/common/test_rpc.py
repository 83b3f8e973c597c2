"""The gRPC server and channel factories over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from forebay.worker.v1 import worker_pb2 as pb
from forebay.worker.v1 import worker_pb2_grpc
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ForebayError,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate
from services.common.rpc.server import RpcServer, Service, rpc_server
from services.common.rpc.stream import StreamEnded, send

NAME = "forebay.worker.v1.WorkerService"


@dataclass
class ToyWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Does in each kind of call what the test wants."""

    failure: Exception | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def Snapshot(self, request: Any, context: Any) -> pb.SnapshotResponse:
        self._fail()
        return pb.SnapshotResponse(publisher="w")

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        count = len(request.prompt_token_ids)
        yield pb.GenerateResponse(delta=pb.RequestDelta(token_ids=[count]))
        self._fail()

    async def Session(
        self, request: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        try:
            step = 0
            async for _ in request:
                step += 1
                yield pb.SessionResponse(step=step)
                self._fail()
        finally:
            self.ended.set()


@dataclass
class Toy:
    worker: ToyWorker
    server: RpcServer
    channel: grpc.aio.Channel
    stub: Any


@pytest.fixture
async def toy() -> AsyncIterator[Toy]:
    worker = ToyWorker()
    service = Service(NAME, worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker)
    async with (
        rpc_server("127.0.0.1", 0, [service], grace_s=0.1) as server,
        open_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield Toy(worker, server, channel, worker_pb2_grpc.WorkerServiceStub(channel))


async def unary(toy: Toy) -> None:
    await toy.stub.Snapshot(pb.SnapshotRequest(), timeout=5)


async def stream(toy: Toy) -> None:
    async for _ in toy.stub.Generate(pb.GenerateRequest(), timeout=5):
        pass


async def session(toy: Toy) -> None:
    call = toy.stub.Session(timeout=5)
    await call.write(pb.SessionRequest())
    while await call.read() is not grpc.aio.EOF:
        pass


ERRORS: list[ForebayError] = [
    InvalidRequest("bad", field="temperature", reason="TOO_HOT"),
    NotFound("no such", metadata={"what": "model"}),
    FailedPrecondition("not now", reason="DRAINING"),
    Overloaded("full", retry_after_s=2.5),
    Unavailable("away"),
    DeadlineExceeded("late"),
    Internal("ours"),
]


@pytest.mark.parametrize("call", [unary, stream, session])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
async def test_domain_errors_arrive_whole(
    toy: Toy, error: ForebayError, call: Callable[[Toy], Any]
) -> None:
    toy.worker.failure = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(toy)
    back = translate(caught.value)
    assert type(back) is type(error)
    assert (back.message, back.reason, back.metadata) == (
        error.message,
        error.reason,
        error.metadata,
    )
    if isinstance(error, InvalidRequest):
        assert isinstance(back, InvalidRequest) and back.field == error.field
    if isinstance(error, Overloaded):
        assert isinstance(back, Overloaded) and back.retry_after_s == error.retry_after_s


@pytest.mark.parametrize("call", [unary, stream, session])
async def test_unexpected_errors_are_internal_and_tell_nothing(
    toy: Toy, call: Callable[[Toy], Any], caplog: pytest.LogCaptureFixture
) -> None:
    toy.worker.failure = KeyError("the prompt was: secret plans")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(toy)
    back = translate(caught.value)
    assert type(back) is Internal
    assert "secret" not in back.message and NAME in back.message


async def test_the_server_goes_on_after_errors(toy: Toy) -> None:
    toy.worker.failure = KeyError("x")
    with pytest.raises(grpc.aio.AioRpcError):
        await unary(toy)
    toy.worker.failure = None
    await unary(toy)


async def test_errors_of_grpc_itself_are_translated(toy: Toy) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await toy.stub.GetModelCard(pb.GetModelCardRequest(), timeout=5)
    error = translate(caught.value)
    assert type(error) is Internal and error.reason == "UNIMPLEMENTED"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await toy.stub.Session(timeout=0.1).read()
    error = translate(caught.value)
    assert type(error) is DeadlineExceeded and error.reason == "DEADLINE_EXCEEDED"


async def test_a_refused_connection_is_unavailable_at_once(unused_tcp_port: int) -> None:
    async with open_channel(f"127.0.0.1:{unused_tcp_port}") as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        async with asyncio.timeout(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Snapshot(pb.SnapshotRequest(), timeout=5)
    assert type(translate(caught.value)) is Unavailable


async def test_cancelling_a_call_ends_the_handler(toy: Toy) -> None:
    call = toy.stub.Session()
    await call.write(pb.SessionRequest())
    await call.read()
    call.cancel()
    async with asyncio.timeout(5):
        await toy.worker.ended.wait()


async def test_health_follows_set_serving(toy: Toy) -> None:
    stub: Any = health_pb2_grpc.HealthStub(toy.channel)
    status = health_pb2.HealthCheckResponse

    async def check(service: str) -> int:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        return int(answer.status)

    for name in ("", NAME):
        assert await check(name) == status.NOT_SERVING
    await toy.server.set_serving(True)
    for name in ("", NAME):
        assert await check(name) == status.SERVING
    await toy.server.set_serving(False)
    assert await check(NAME) == status.NOT_SERVING


async def test_reflection_lists_and_describes_services(toy: Toy) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(toy.channel)
    call = stub.ServerReflectionInfo(timeout=5)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    names = {s.name for s in answer.list_services_response.service}
    assert names == {
        NAME,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME))
    answer = await call.read()
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(f)
        for f in answer.file_descriptor_response.file_descriptor_proto
    ]
    assert any(s.name == "WorkerService" for f in files for s in f.service)
    call.cancel()


async def test_a_prompt_of_a_million_tokens_passes(toy: Toy) -> None:
    # The widest ids: five bytes each on the wire.
    request = pb.GenerateRequest(prompt_token_ids=[2**32 - 1] * 1_048_576)
    async for answer in toy.stub.Generate(request, timeout=30):
        assert list(answer.delta.token_ids) == [1_048_576]


async def test_a_taken_port_is_named(toy: Toy) -> None:
    with pytest.raises(Unavailable, match=f"127.0.0.1:{toy.server.port}") as caught:
        async with rpc_server("127.0.0.1", toy.server.port, []):
            pass
    assert caught.value.reason == "PORT_TAKEN"


async def test_ipv6_loopback() -> None:
    async with rpc_server("::1", 0, []) as server, open_channel(f"[::1]:{server.port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_client_reconnects_soon_after_the_server_is_back(unused_tcp_port: int) -> None:
    async with open_channel(f"127.0.0.1:{unused_tcp_port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for _ in range(2):
            async with rpc_server("127.0.0.1", unused_tcp_port, [], grace_s=0):
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=3, wait_for_ready=True)
            for _ in range(5):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.Check(health_pb2.HealthCheckRequest(), timeout=0.2)


async def test_a_write_to_an_ended_call_tells_why_it_ended(toy: Toy) -> None:
    toy.worker.failure = Unavailable("going home")
    call = toy.stub.Session(timeout=5)
    await send(call, pb.SessionRequest())
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    with pytest.raises(StreamEnded, match="going home"):
        await send(call, pb.SessionRequest())
