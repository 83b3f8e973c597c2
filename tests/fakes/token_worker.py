"""A scripted WorkerService over real gRPC: no engine, a made-up model, every move under the test's
hand.

Its "model" is a function of all tokens before, so that a request which goes on elsewhere must end
in the same tokens. It remembers blocks, so that cached tokens are real. A prefill leg leaves KV,
which `held` lists until the worker that is handed it takes it, or somebody lets go of it.
"""

import asyncio
import hashlib
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from forebay.worker.v1 import worker_pb2 as pb
from forebay.worker.v1 import worker_pb2_grpc as pb_grpc

from services.common.blocks import block_hashes, block_keys
from services.common.cards import (
    Adapter,
    HashVector,
    Holder,
    Instance,
    InstanceKind,
    ModelCard,
    ModelFile,
)
from services.common.ids import new_incarnation
from services.common.rpc.server import SERVER_OPTIONS

BLOCK = 32
VECTOR_TOKENS = tuple(range(2, 2 + 2 * BLOCK))


def next_token(context: Sequence[int], vocab_size: int) -> int:
    """The made-up model: any token but the first three, which are special."""
    raw = b"".join(t.to_bytes(4, "big") for t in context[-64:])
    return 3 + zlib.crc32(raw + len(context).to_bytes(4, "big")) % (vocab_size - 3)


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int = 2048) -> list[int]:
    """What the made-up model says after `prompt`."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context, vocab_size))
    return context[len(prompt) :]


def make_card(folder: Path, model: str = "tiny", **changes: Any) -> ModelCard:
    """The card of a worker with that folder's tokenizer."""
    files = []
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = (folder / name).read_bytes()
        files.append(ModelFile(name, hashlib.sha256(content).digest(), len(content)))
    vector = HashVector(VECTOR_TOKENS, "pepper", ())
    hashes = tuple(block_hashes(vector.token_ids, BLOCK, cache_salt=vector.cache_salt))
    fields: dict[str, Any] = {
        "model": model,
        "namespace": b"n" * 32,
        "block_size": BLOCK,
        "max_model_len": 4096,
        "vocab_size": 2048,
        "eos_token_ids": (2,),
        "files": tuple(files),
        "hash_vector": HashVector(vector.token_ids, vector.cache_salt, hashes),
        "engine": "fake 1",
        "created_unix_s": 1_700_000_000,
    }
    return ModelCard(**{**fields, **changes})


@dataclass
class Running:
    """A sequence that the worker has."""

    request: pb.GenerateRequest
    context: list[int]
    produced: int = 0
    first: bool = True


@dataclass(eq=False)
class _Session:
    running: dict[str, Running] = field(default_factory=dict)
    outbox: asyncio.Queue[pb.SessionResponse] = field(default_factory=asyncio.Queue)


Refuse = Callable[[pb.GenerateRequest], pb.RequestError | None]


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(repr(list(tokens)).encode()).digest()


class TokenWorker(pb_grpc.WorkerServiceServicer):
    """`async with TokenWorker("w0", folder) as worker:` serves; `worker.instance` is its record.

    With `interval_s` None nothing moves until `step()`; else it steps by itself.
    """

    def __init__(
        self,
        worker_id: str,
        folder: Path,
        *,
        interval_s: float | None = 0.0,
        card: ModelCard | None = None,
        adapters: tuple[Adapter, ...] = (),
        port: int = 0,
    ) -> None:
        self.id = worker_id
        self.folder = folder
        self.card = card or make_card(folder, adapters=adapters)
        self.interval_s = interval_s
        self.port = port
        self.incarnation = new_incarnation()
        self.refuse: Refuse = lambda request: None
        """Says why a request is not taken."""
        self.eos_after: int | None = None
        """Every sequence ends with its end token after so many tokens."""
        self.requests: list[pb.GenerateRequest] = []
        self.aborted: list[tuple[str, float]] = []
        """Request id and loop time of every abort, session ends included."""
        self.metadata: list[dict[str, str]] = []
        self.changed = asyncio.Event()
        """Set at every request and abort; clear it before waiting."""
        self.blocks: set[int] = set()
        self.hands_over = True
        """Whether a prefill leg ends with a handle."""
        self.peers: dict[str, TokenWorker] = {}
        """Workers by id whose KV it can take."""
        self.held: dict[str, bytes] = {}
        """KV of ended prefill legs, by name: a digest of the tokens that it is of."""
        self.released: list[str] = []
        """Names of KV that it was told to let go of."""
        self.deaf = False
        """True: aborts come too late for whatever runs."""
        self._sessions: set[_Session] = set()
        self._wake = asyncio.Event()
        self._steps = 0
        self._server: Any = None
        self._stepper: asyncio.Task[None] | None = None

    @property
    def instance(self) -> Instance:
        """Its record in discovery."""
        return Instance(
            id=self.id,
            kind=InstanceKind.WORKER,
            incarnation=self.incarnation,
            address=f"127.0.0.1:{self.port}",
            card=self.card,
        )

    @property
    def holder(self) -> Holder:
        return Holder(self.id, self.incarnation)

    @property
    def running(self) -> list[Running]:
        """All sequences that it has."""
        return [r for s in self._sessions for r in s.running.values()]

    async def __aenter__(self) -> "TokenWorker":
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        pb_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        if self.interval_s is not None:
            self._stepper = asyncio.create_task(self._step_forever())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Closes the port and cuts every stream, as kill -9 would."""
        if self._stepper is not None:
            self._stepper.cancel()
            await asyncio.gather(self._stepper, return_exceptions=True)
            self._stepper = None
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Waits until `condition` holds; looked at on every request and abort."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def step(self, count: int = 1) -> None:
        """One engine step (or several): a token for every sequence."""
        for _ in range(count):
            self._steps += 1
            for session in self._sessions:
                deltas = [self._advance(session, r) for r in list(session.running.values())]
                if deltas:
                    frame = pb.SessionResponse(step=self._steps, deltas=deltas)
                    session.outbox.put_nowait(frame)

    def sign(self) -> None:
        """A sign of life on every session."""
        for session in self._sessions:
            session.outbox.put_nowait(pb.SessionResponse(step=self._steps))

    def say(self, request_id: str, delta: pb.RequestDelta) -> None:
        """Puts a delta of the test's own on whatever session has the request; a finish ends it."""
        for session in self._sessions:
            if request_id in session.running:
                delta.request_id = request_id
                if delta.finish_reason:
                    del session.running[request_id]
                session.outbox.put_nowait(pb.SessionResponse(step=self._steps, deltas=[delta]))

    async def _step_forever(self) -> None:
        while True:
            if not self.running:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(self.interval_s or 0)
            self.step()

    def _advance(self, session: _Session, r: Running) -> pb.RequestDelta:
        delta = pb.RequestDelta(request_id=r.request.request_id)
        if r.first:
            r.first = False
            delta.cached_tokens = self._cached(r)
            if (taken := self._take(r)) > delta.cached_tokens:
                delta.transferred_tokens = taken - delta.cached_tokens
                delta.cached_tokens = taken
        token = next_token(r.context, self.card.vocab_size)
        limit = 1 if r.request.prefill_only else r.request.sampling.max_tokens
        r.produced += 1
        if r.request.prefill_only and self.hands_over:
            delta.transfer.CopyFrom(self._hold(r))
        if self.eos_after is not None and r.produced >= self.eos_after:
            token = self.card.eos_token_ids[0]
            delta.finish_reason = pb.FINISH_REASON_STOP
        elif r.produced >= limit:
            delta.finish_reason = pb.FINISH_REASON_LENGTH
        r.context.append(token)
        delta.token_ids.append(token)
        if r.request.sampling.HasField("logprobs"):
            position = delta.logprobs.add(token_id=token, logprob=-0.5, rank=1)
            for k in range(r.request.sampling.logprobs):
                position.top_token_ids.append(token if k == 0 else 3 + k)
                position.top_logprobs.append(-0.5 - k)
        if delta.finish_reason:
            del session.running[r.request.request_id]
        return delta

    def _hold(self, r: Running) -> pb.TransferHandle:
        name = f"kv-{r.request.request_id}"
        self.held[name] = _digest(r.context)
        return pb.TransferHandle(
            source=self.holder.to_proto(),
            namespace=self.card.namespace,
            engine_params=b"where it is",
            expires_ms=30_000,
            way="fake",
            tokens=len(r.context),
            request_id=name,
        )

    def _take(self, r: Running) -> int:
        """Tokens whose KV comes from elsewhere; 0 when it is of others, or not there (any more)."""
        handle = r.request.transfer
        source = self.peers.get(handle.source.id)
        if source is None or source.holder != Holder.from_proto(handle.source):
            return 0
        kv = source.held.pop(handle.request_id, None)
        return handle.tokens - 1 if kv == _digest(r.context) else 0

    def _cached(self, r: Running) -> int:
        keys = block_keys(r.context, BLOCK, cache_salt=r.request.cache_salt)
        hit = 0
        while hit < len(keys) and keys[hit] in self.blocks and (hit + 1) * BLOCK < len(r.context):
            hit += 1
        self.blocks.update(keys)
        return hit * BLOCK

    def _admit(self, session: _Session, request: pb.GenerateRequest) -> None:
        self.requests.append(request)
        error = self.refuse(request)
        if error is not None:
            delta = pb.RequestDelta(
                request_id=request.request_id, finish_reason=pb.FINISH_REASON_ERROR, error=error
            )
            session.outbox.put_nowait(pb.SessionResponse(step=self._steps, deltas=[delta]))
        else:
            context = [*request.prompt_token_ids, *request.prior_output_token_ids]
            session.running[request.request_id] = Running(request, context)
        self._wake.set()
        self.changed.set()

    def _abort(self, session: _Session, request_id: str) -> None:
        if self.deaf or session.running.pop(request_id, None) is None:
            return
        self.aborted.append((request_id, asyncio.get_running_loop().time()))
        delta = pb.RequestDelta(request_id=request_id, finish_reason=pb.FINISH_REASON_ABORT)
        session.outbox.put_nowait(pb.SessionResponse(step=self._steps, deltas=[delta]))
        self.changed.set()

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        session = _Session()
        self._sessions.add(session)
        self.metadata.append({k: str(v) for k, v in context.invocation_metadata()})

        async def read() -> None:
            async for message in request_iterator:
                if message.HasField("generate"):
                    self._admit(session, message.generate)
                elif message.HasField("abort"):
                    self._abort(session, message.abort.request_id)
                elif message.HasField("release"):
                    self.held.pop(message.release.request_id, None)
                    self.released.append(message.release.request_id)
                    self.changed.set()

        reader = asyncio.create_task(read())
        try:
            while True:
                yield await session.outbox.get()
        finally:
            reader.cancel()
            self._sessions.discard(session)
            for request_id in list(session.running):
                self.aborted.append((request_id, asyncio.get_running_loop().time()))
            self.changed.set()

    async def GetModelFile(
        self, request: pb.GetModelFileRequest, context: Any
    ) -> AsyncIterator[pb.GetModelFileResponse]:
        if request.name not in {f.name for f in self.card.files}:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such file")
        content = (self.folder / request.name).read_bytes()
        for start in range(0, len(content), 1 << 16):
            yield pb.GetModelFileResponse(chunk=content[start : start + (1 << 16)])


def error(
    code: grpc.StatusCode, reason: str, message: str = "", field: str = ""
) -> pb.RequestError:
    """A RequestError for `refuse`."""
    return pb.RequestError(
        code=code.value[0], reason=reason, message=message or reason, field=field
    )
