"""An etcd that ends calls at a bad moment, or never answers: leases and watches go on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from etcdserverpb import rpc_pb2 as pb
from etcdserverpb import rpc_pb2_grpc as stubs

from services.common.etcd.client import open_etcd
from services.common.etcd.config import EtcdConfig
from services.common.etcd.lease import leased_key
from services.common.etcd.watch import Listed, watch_prefix
from tests.support.polling import until


class Moody(stubs.LeaseServicer, stubs.KVServicer):
    """Grants and stores; renews once it has cancelled that often."""

    def __init__(self, cancels: int) -> None:
        self.cancels = cancels
        self.renewed = 0

    async def LeaseGrant(self, request: pb.LeaseGrantRequest, context: Any) -> Any:
        return pb.LeaseGrantResponse(ID=7, TTL=request.TTL)

    async def LeaseRevoke(self, request: pb.LeaseRevokeRequest, context: Any) -> Any:
        return pb.LeaseRevokeResponse()

    async def LeaseKeepAlive(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if self.cancels:
                self.cancels -= 1
                await context.abort(grpc.StatusCode.CANCELLED, "etcdserver: request cancelled")
            self.renewed += 1
            yield pb.LeaseKeepAliveResponse(ID=request.ID, TTL=2)

    async def Put(self, request: pb.PutRequest, context: Any) -> Any:
        return pb.PutResponse()

    async def Txn(self, request: pb.TxnRequest, context: Any) -> Any:
        return pb.TxnResponse(succeeded=True)


@asynccontextmanager
async def serving(servicer: Moody) -> AsyncIterator[str]:
    server = grpc.aio.server()
    stubs.add_LeaseServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    stubs.add_KVServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    if isinstance(servicer, stubs.WatchServicer):
        stubs.add_WatchServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_lease_outlives_cancelled_renewals() -> None:
    servicer = Moody(cancels=2)

    async def renewed() -> int:
        return servicer.renewed

    async with (
        serving(servicer) as endpoint,
        open_etcd(EtcdConfig(endpoints=(endpoint,))) as client,
        leased_key(client, b"/k", b"v", ttl_s=0.6) as leased,
    ):
        assert await leased.wait_stored(5)
        await until(renewed, lambda n: n >= 2, within_s=5, what="renewals after the cancelled ones")


async def test_a_lease_outlives_a_renewal_that_hangs() -> None:
    """grpc.aio's `write` never returns when the connection breaks while a call is being made."""
    servicer = Moody(cancels=0)
    hung = asyncio.Event()

    class Hanging:
        async def write(self, request: object) -> None:
            hung.set()
            await asyncio.Event().wait()

        def cancel(self) -> None:
            pass

    async def renewed() -> int:
        return servicer.renewed

    async with (
        serving(servicer) as endpoint,
        open_etcd(EtcdConfig(endpoints=(endpoint,), attempt_timeout_s=0.3)) as client,
        leased_key(client, b"/k", b"v", ttl_s=0.6) as leased,
    ):
        assert await leased.wait_stored(5)
        client.connection.lease.LeaseKeepAlive = lambda **_: Hanging()  # of this connection only
        await asyncio.wait_for(hung.wait(), 5)
        await until(renewed, lambda n: n >= 2, within_s=5, what="renewals after the hung one")


async def test_our_own_cancellation_still_ends_a_call() -> None:
    started = asyncio.Event()

    class Slow(Moody):
        async def Put(self, request: pb.PutRequest, context: Any) -> Any:
            started.set()
            await asyncio.sleep(30)

    async with serving(Slow(0)) as endpoint, open_etcd(EtcdConfig(endpoints=(endpoint,))) as client:
        task = asyncio.create_task(client.put(b"/k", b"v"))
        await started.wait()
        task.cancel()
        await asyncio.wait({task}, timeout=2)
        assert task.cancelled()


async def test_a_watch_outlives_a_call_that_ends_just_before_a_write() -> None:
    """grpc.aio then raises InvalidStateError, which is no RpcError."""
    watches = 0

    class Watched(Moody, stubs.WatchServicer):
        async def Range(self, request: pb.RangeRequest, context: Any) -> Any:
            return pb.RangeResponse(header=pb.ResponseHeader(revision=1))

        async def Watch(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            nonlocal watches
            watches += 1
            async for _ in requests:
                yield pb.WatchResponse(created=True)

    class EndsEarly:
        def __init__(self, call: Any) -> None:
            self._call = call
            self._writes = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._call, name)

        async def write(self, request: object) -> None:
            self._writes += 1
            if self._writes > 1:
                self._call.cancel()
            await self._call.write(request)

    async def again() -> int:
        return watches

    async def follow(client: Any) -> None:
        async for event in watch_prefix(client, b"/p", progress_s=0.05, stall_s=2.0):
            assert isinstance(event, Listed)

    async with (
        serving(Watched(cancels=0)) as endpoint,
        open_etcd(EtcdConfig(endpoints=(endpoint,))) as client,
    ):
        real = client.connection.watch.Watch
        client.connection.watch.Watch = lambda **kw: EndsEarly(real(**kw))
        task = asyncio.create_task(follow(client))
        await until(again, lambda n: n >= 2, within_s=10, what="a second watch")
        assert not task.done()
        task.cancel()
