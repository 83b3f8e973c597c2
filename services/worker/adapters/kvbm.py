"""The worker's questions to its node's kvbm: what is there of a prompt? An answer is a lease.

Away, slow or odd is a miss, never an error: after the deadline, and while the breaker is open at
once. The lease goes to the engine with the request; the connector inside it does the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc

from services.common.errors import ForebayError
from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate
from services.common.telemetry.logging import get_logger
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.connector.lookup import lookup_request, terms_of
from services.worker.connector.terms import Terms, from_params, to_params
from services.worker.core.breaker import Breaker
from services.worker.ports import Question

RELEASE_TIMEOUT_S = 2.0
LATE_S = 5.0
"""So long an answer is still heard that nobody waits for any more."""
TASKS_LIMIT = 256
"""Calls on their way at once beyond which leases are left to expire by themselves."""
T = TypeVar("T")
log = get_logger(__name__)


class KvbmClient:
    """One worker's client. Loop's thread only."""

    def __init__(
        self, stub: Any, namespace: bytes, timeout_s: float, metrics: WorkerMetrics
    ) -> None:
        self._stub = stub
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._breaker = Breaker()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def look_up(self, question: Question) -> Mapping[str, Any]:
        """What the engine is to know of a request's blocks, as `kv_transfer_params`."""
        if question.only_stored:
            question = replace(question, have=len(question.keys))
        terms = Terms(
            assumed=question.have,
            recompute_block_s=question.recompute_block_s,
            tenant=question.tenant,
        )
        if question.have >= len(question.keys) and not (question.only_stored and question.keys):
            self._count("needless")
            return to_params(terms)
        now_s = time.monotonic()
        if not self._breaker.allow(now_s):
            self._count("breaker")
            return to_params(terms)
        return to_params(await self._ask(question.keys, question, terms, now_s))

    async def _ask(
        self, keys: Sequence[bytes], question: Question, terms: Terms, now_s: float
    ) -> Terms:
        request = lookup_request(
            self._namespace,
            keys,
            skip=question.have,
            tenant=question.tenant,
            recompute_block_s=question.recompute_block_s,
            wait_s=question.wait_s,
        )
        # A call of its own: who stops waiting for it still hears of the lease that it brings.
        call = self._spawn(self._call(request))
        try:
            await asyncio.wait({call}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            self._breaker.cancelled()
            call.add_done_callback(self._late)
            raise
        if not call.done():
            call.add_done_callback(self._late)
            self._failed("timeout")
            return terms
        answer = call.result()
        if isinstance(answer, ForebayError):
            if answer.reason == "NAMESPACE_UNKNOWN":
                self._succeeded("unknown", now_s)
            else:
                self._failed("failed")
            return terms
        self._succeeded("hit" if answer.lease else "miss", now_s)
        return terms_of(answer, terms, question.have, now_s)

    async def _call(self, request: pb.LookupRequest) -> pb.LookupResponse | ForebayError:
        try:
            answer: pb.LookupResponse = await self._stub.Lookup(
                request, timeout=max(self._timeout_s, LATE_S)
            )
        except grpc.RpcError as exc:
            return translate(exc)
        return answer

    def _late(self, call: asyncio.Task[Any]) -> None:
        """An answer that nobody waits for: its lease is given back."""
        answer = None if call.cancelled() else call.result()
        if isinstance(answer, pb.LookupResponse) and answer.lease:
            self._give_back(answer.lease)

    def release(self, params: Mapping[str, Any]) -> None:
        """Gives back the lease of a request that never reached the engine, if it has one."""
        terms = from_params(params)
        if terms is not None and terms.lease is not None:
            self._give_back(terms.lease.id)

    def _give_back(self, lease: int) -> None:
        if len(self._tasks) < TASKS_LIMIT:
            self._spawn(self._release(lease))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name="kvbm call")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _release(self, lease: int) -> None:
        request = pb.ReleaseRequest(leases=[pb.LoadReport(lease=lease)])
        try:
            await self._stub.Release(request, timeout=RELEASE_TIMEOUT_S)
        except grpc.RpcError as exc:
            log.info("a lease is left to expire", error=translate(exc).message)

    async def close(self) -> None:
        """Waits for what is on its way, but not long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=RELEASE_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()

    def _succeeded(self, outcome: str, began_s: float) -> None:
        if self._breaker.open:
            log.info("kvbm answers again")
        self._breaker.succeeded()
        self._count(outcome)
        self._metrics.kvbm_lookup.observe(time.monotonic() - began_s)
        self._metrics.kvbm_breaker.set(0)

    def _failed(self, outcome: str) -> None:
        was = self._breaker.open
        self._breaker.failed(time.monotonic())
        if self._breaker.open and not was:
            log.warning("kvbm does not answer; requests go on without its tiers")
        self._count(outcome)
        self._metrics.kvbm_breaker.set(self._breaker.open)

    def _count(self, outcome: str) -> None:
        self._metrics.kvbm_lookups.labels(outcome).inc()


@asynccontextmanager
async def open_kvbm(
    address: str, namespace: bytes, timeout_s: float, metrics: WorkerMetrics
) -> AsyncIterator[KvbmClient]:
    """A client of the daemon at `address`, whether or not it is there."""
    async with open_channel(address) as channel:
        # Now, not within the first request's deadline.
        channel.get_state(try_to_connect=True)
        client = KvbmClient(kvbm_pb2_grpc.KvbmServiceStub(channel), namespace, timeout_s, metrics)
        try:
            yield client
        finally:
            await client.close()
