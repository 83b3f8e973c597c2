"""The worker's questions to its node's kvbm: what is there of a prompt? An answer is a lease.

Away, slow or odd is a miss, never an error: after the deadline, and while the breaker is open at
once. The lease goes to the engine with the request; the connector inside it does the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate
from services.common.telemetry.logging import get_logger
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.connector.lookup import lookup_request, terms_of
from services.worker.connector.terms import Terms, from_params, to_params
from services.worker.core.breaker import Breaker
from services.worker.ports import Question

RELEASE_TIMEOUT_S = 2.0
RELEASES_LIMIT = 256
"""Releases on their way at once; more are left to expire by themselves."""
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
        self._releases: set[asyncio.Task[None]] = set()

    async def look_up(self, question: Question) -> Mapping[str, Any]:
        """What the engine is to know of a request's blocks, as `kv_transfer_params`."""
        terms = Terms(assumed=question.have, recompute_block_s=question.recompute_block_s)
        if question.have >= len(question.keys):
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
            recompute_block_s=question.recompute_block_s,
            wait_s=question.wait_s,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._stub.Lookup(request, timeout=self._timeout_s)
        except asyncio.CancelledError:
            self._breaker.succeeded()  # says nothing; a trial must not be left open
            raise
        except TimeoutError:
            self._failed("timeout")
            return terms
        except grpc.RpcError as exc:
            error = translate(exc)
            if error.reason == "NAMESPACE_UNKNOWN":
                self._succeeded("unknown", now_s)
            else:
                late = error.code is grpc.StatusCode.DEADLINE_EXCEEDED
                self._failed("timeout" if late else "failed")
            return terms
        self._succeeded("hit" if answer.lease else "miss", now_s)
        return terms_of(answer, terms, question.have, now_s)

    def release(self, params: Mapping[str, Any]) -> None:
        """Gives back the lease of a request that never reached the engine, if it has one."""
        terms = from_params(params)
        if terms is None or terms.lease is None or len(self._releases) >= RELEASES_LIMIT:
            return
        task = asyncio.create_task(self._release(terms.lease.id), name="release a lease")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, lease: int) -> None:
        request = pb.ReleaseRequest(leases=[pb.LoadReport(lease=lease)])
        try:
            await self._stub.Release(request, timeout=RELEASE_TIMEOUT_S)
        except grpc.RpcError as exc:
            log.info("a lease is left to expire", error=translate(exc).message)

    async def close(self) -> None:
        """Waits for releases on their way."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=RELEASE_TIMEOUT_S)

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
        client = KvbmClient(kvbm_pb2_grpc.KvbmServiceStub(channel), namespace, timeout_s, metrics)
        try:
            yield client
        finally:
            await client.close()
