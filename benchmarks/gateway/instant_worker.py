"""A worker without an engine: every request's next token is ready at once, one frame a step.

It speaks the whole contract (discovery, session, snapshot, events), so that gateway and router do
all of their work; what is measured through it is theirs alone. For benchmarks, never for tests of
behaviour.
"""

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forebay.worker.v1 import worker_pb2 as pb
from forebay.worker.v1 import worker_pb2_grpc

from services.common import lifecycle
from services.common.blocks import block_hashes
from services.common.cards import HashVector, Holder, Instance, InstanceKind, ModelCard, ModelFile
from services.common.discovery import open_discovery
from services.common.events.codec import snapshot_to_proto
from services.common.events.model import RequestAdmitted, RequestFinished, Snapshot
from services.common.events.publisher import EventPublisher, open_publisher
from services.common.ids import AttemptId, new_incarnation
from services.common.net import host_port
from services.common.rpc.server import Service, rpc_server
from services.common.settings import ServiceSettings, settings_config
from services.common.telemetry.logging import setup_logging

BLOCK_SIZE = 32
FIRST_TOKEN = 300
"""Ids from here on are plain words in the tiny tokenizer."""
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


class InstantSettings(ServiceSettings):
    """What it can be told."""

    model_config = settings_config("instant")
    service: ClassVar[str] = "instant"

    port: int = 0
    """gRPC port; 0 picks a free one."""
    events_port: int = 0
    """Port of the event stream; 0 picks a free one."""
    model: str = ""
    """Folder with the tokenizer's files."""
    served_model_name: str = "instant"
    """Name of the model."""


@dataclass(slots=True)
class _Running:
    request: pb.GenerateRequest
    produced: int = 0


class InstantWorker(worker_pb2_grpc.WorkerServiceServicer):
    """The service."""

    def __init__(
        self, card: ModelCard, holder: Holder, model: Path, events: EventPublisher
    ) -> None:
        self._card = card
        self._holder = holder
        self._model = model
        self._events = events
        self._steps = 0

    async def Session(
        self, requests: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        """One token for each running request a step, steps without a pause."""
        running: dict[str, _Running] = {}
        work = asyncio.Event()
        closed = False

        async def read() -> None:
            nonlocal closed
            async for message in requests:
                if message.HasField("generate"):
                    request = message.generate
                    running[request.request_id] = _Running(request)
                    tokens = len(request.prompt_token_ids)
                    admitted = RequestAdmitted(
                        AttemptId(request.attempt_id), tokens, request.sampling.max_tokens
                    )
                    self._events.publish([admitted])
                elif message.HasField("abort"):
                    running.pop(message.abort.request_id, None)
                work.set()
            closed = True
            work.set()

        reader = asyncio.create_task(read())
        try:
            while not closed:
                await work.wait()
                if not running:
                    work.clear()
                    continue
                yield self._step(running)
                await asyncio.sleep(0)  # what came in meanwhile joins the next step
        finally:
            reader.cancel()

    def _step(self, running: dict[str, _Running]) -> pb.SessionResponse:
        self._steps += 1
        frame = pb.SessionResponse(step=self._steps)
        finished = []
        for request_id, one in list(running.items()):
            delta = frame.deltas.add(request_id=request_id)
            delta.token_ids.append(FIRST_TOKEN + one.produced % 64)
            if one.produced == 0:
                delta.cached_tokens = 0
            one.produced += 1
            if one.produced >= one.request.sampling.max_tokens:
                delta.finish_reason = pb.FINISH_REASON_LENGTH
                del running[request_id]
                attempt = AttemptId(one.request.attempt_id)
                finished.append(RequestFinished(attempt, 0, one.produced))
        self._events.publish(finished)
        return frame

    async def Snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.SnapshotResponse:
        """It has no blocks."""
        return snapshot_to_proto(
            Snapshot(self._holder.id, self._holder.incarnation, self._events.sequence)
        )

    async def GetModelCard(
        self, request: pb.GetModelCardRequest, context: Any
    ) -> pb.GetModelCardResponse:
        """The card."""
        return pb.GetModelCardResponse(card=self._card.to_proto(), worker=self._holder.to_proto())

    async def GetModelFile(
        self, request: pb.GetModelFileRequest, context: Any
    ) -> AsyncIterator[pb.GetModelFileResponse]:
        """One of the tokenizer's files."""
        content = await asyncio.to_thread((self._model / Path(request.name).name).read_bytes)
        for start in range(0, len(content), 1 << 20):
            yield pb.GetModelFileResponse(chunk=content[start : start + (1 << 20)])


def _card(settings: InstantSettings) -> ModelCard:
    folder = Path(settings.model)
    contents = {n: (folder / n).read_bytes() for n in FILES if (folder / n).exists()}
    config = json.loads((folder / "config.json").read_text())
    example = tuple(range(2 * BLOCK_SIZE))
    return ModelCard(
        model=settings.served_model_name,
        namespace=hashlib.sha256(b"instant").digest(),
        block_size=BLOCK_SIZE,
        max_model_len=int(config["max_position_embeddings"]),
        vocab_size=int(config["vocab_size"]),
        eos_token_ids=(int(config["eos_token_id"]),),
        files=tuple(ModelFile(n, hashlib.sha256(c).digest(), len(c)) for n, c in contents.items()),
        hash_vector=HashVector(example, "", tuple(block_hashes(example, BLOCK_SIZE))),
        engine="instant",
        created_unix_s=int(time.time()),
        total_blocks=100_000,
    )


async def serve(settings: InstantSettings, life: lifecycle.Lifecycle) -> None:
    """Serves until told to stop."""
    incarnation = new_incarnation()
    card = _card(settings)
    async with AsyncExitStack() as stack:
        events = await stack.enter_async_context(
            open_publisher(settings.host, settings.events_port, settings.id, incarnation)
        )
        servicer = InstantWorker(  # type: ignore[abstract] # what is not there answers UNIMPLEMENTED
            card, Holder(settings.id, incarnation), Path(settings.model), events
        )
        service = Service(
            "forebay.worker.v1.WorkerService",
            worker_pb2_grpc.add_WorkerServiceServicer_to_server,
            servicer,
        )
        server = await stack.enter_async_context(
            rpc_server(settings.host, settings.port, [service])
        )
        instance = Instance(
            id=settings.id,
            kind=InstanceKind.WORKER,
            incarnation=incarnation,
            address=host_port(settings.host, server.port),
            events_address=events.address,
            card=card,
        )
        discovery = await stack.enter_async_context(open_discovery(settings))
        await stack.enter_async_context(discovery.registered(instance))
        await server.set_serving(True)
        life.ready(instance, settings.ready_file)
        await life.wait_stop()


def main() -> int:
    """Runs one: `python -m benchmarks.gateway.instant_worker --model FOLDER`."""
    settings = InstantSettings.load_or_exit()
    setup_logging(settings.service, level=settings.log_level, fmt=settings.log_format)
    return lifecycle.run(lambda life: serve(settings, life))


if __name__ == "__main__":
    sys.exit(main())
