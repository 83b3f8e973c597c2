"""A scripted RouterService over real gRPC: the test decides, or leaves a question unanswered."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from forebay.router.v1 import router_pb2 as pb
from forebay.router.v1 import router_pb2_grpc as pb_grpc

from services.common.cards import Instance, InstanceKind
from services.common.ids import new_id, new_incarnation
from services.common.rpc.server import SERVER_OPTIONS

Answer = pb.RouteResponse | pb.RouteFailure | pb.RouteWaiting | None
Decide = Callable[[pb.RouteRequest], Answer]


def always(worker: Instance, predicted: int = 0) -> Decide:
    """Sends everything to one worker, unless it is excluded."""

    def decide(request: pb.RouteRequest) -> Answer:
        return choose(request, [worker], predicted)

    return decide


def choose(request: pb.RouteRequest, workers: list[Instance], predicted: int = 0) -> Answer:
    """The first worker that is not excluded."""
    for worker in workers:
        if worker.id not in request.excluded_workers:
            return pb.RouteResponse(
                attempt_id=new_id("att"),
                worker={"id": worker.id, "incarnation": worker.incarnation},
                address=worker.address,
                predicted_cached_tokens=predicted,
                policy="fake",
            )
    return pb.RouteFailure(
        code=grpc.StatusCode.UNAVAILABLE.value[0], reason="NO_WORKER", message="nobody is left"
    )


def pair(
    request: pb.RouteRequest,
    prefill: list[Instance],
    decode: list[Instance],
    predicted: int = 0,
    prefill_predicted: int = 0,
) -> Answer:
    """A worker to decode and one to prefill, the first ones that are not excluded; one for all if
    the request wishes so, or nobody is left to prefill."""
    answer = choose(request, decode, predicted)
    first = choose(request, prefill, prefill_predicted)
    if request.whole or not isinstance(first, pb.RouteResponse):
        return answer
    if isinstance(answer, pb.RouteResponse):
        answer.prefill_worker.CopyFrom(first.worker)
        answer.prefill_address = first.address
        answer.prefill_attempt_id = first.attempt_id
        answer.predicted_prefill_cached_tokens = first.predicted_cached_tokens
    return answer


class FakeRouter(pb_grpc.RouterServiceServicer):
    """`async with FakeRouter("r0", decide) as router:` serves. `decide` None: never answers."""

    def __init__(self, router_id: str, decide: Decide, *, port: int = 0) -> None:
        self.id = router_id
        self.decide = decide
        self.port = port
        self.incarnation = new_incarnation()
        self.requests: list[pb.RouteRequest] = []
        self.releases: list[pb.ReleasePlacement] = []
        self.cancels: list[int] = []
        """Numbers of questions taken back."""
        self.later: asyncio.Event | None = None
        """A question that waits is asked again when this is set; until then there are signs of
        life."""
        self.signs = 0
        self.issued: list[str] = []
        """Attempt ids given out."""
        self.streams = 0
        self.changed = asyncio.Event()
        self._server: Any = None

    @property
    def instance(self) -> Instance:
        """Its record in discovery."""
        return Instance(
            self.id, InstanceKind.ROUTER, self.incarnation, address=f"127.0.0.1:{self.port}"
        )

    async def __aenter__(self) -> "FakeRouter":
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        pb_grpc.add_RouterServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Closes the port and cuts the streams."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Waits until `condition` holds; looked at on every message."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def _issue(self, answer: pb.RouteResponse) -> None:
        self.issued += filter(None, (answer.attempt_id, answer.prefill_attempt_id))

    async def RouteStream(
        self, request_iterator: AsyncIterator[pb.RouteStreamRequest], context: Any
    ) -> AsyncIterator[pb.RouteStreamResponse]:
        self.streams += 1
        self.changed.set()
        async for message in request_iterator:
            if message.HasField("release"):
                self.releases.append(message.release)
                self.changed.set()
                continue
            if message.HasField("cancel"):
                self.cancels.append(message.correlation_id)
                self.changed.set()
                continue
            self.requests.append(message.route)
            self.changed.set()
            answer = self.decide(message.route)
            number = message.correlation_id
            if isinstance(answer, pb.RouteResponse):
                self._issue(answer)
                yield pb.RouteStreamResponse(correlation_id=number, placement=answer)
            elif isinstance(answer, pb.RouteWaiting):
                yield pb.RouteStreamResponse(correlation_id=number, waiting=answer)
                while self.later is not None and not self.later.is_set():
                    self.signs += 1
                    self.changed.set()
                    await asyncio.sleep(0.1)
                    waiting = pb.RouteWaiting()
                    yield pb.RouteStreamResponse(correlation_id=number, waiting=waiting)
                if self.later is not None:
                    placed = self.decide(message.route)
                    assert isinstance(placed, pb.RouteResponse)
                    self._issue(placed)
                    yield pb.RouteStreamResponse(correlation_id=number, placement=placed)
            elif answer is not None:
                yield pb.RouteStreamResponse(correlation_id=number, failure=answer)
