"""Keys that live as long as this process: put under a lease, renewed, put again whenever lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from etcdserverpb import rpc_pb2 as pb

from services.common.etcd.client import Backoff, Connection, EtcdClient, Metadata
from services.common.etcd.config import EtcdRefused, EtcdUnavailable
from services.common.rpc.stream import send
from services.common.telemetry.logging import get_logger

log = get_logger(__name__)


class LeasedKey:
    """A key that a background task keeps in etcd under a lease of its own; use `leased_key`."""

    def __init__(self, client: EtcdClient, key: bytes, value: bytes, ttl_s: float) -> None:
        self._client = client
        self._key = key
        self._value = value
        self._ttl_s = ttl_s
        self._lease = 0
        self._changed = asyncio.Event()
        self._stored = asyncio.Event()
        self._complaint = ""

    async def set(self, value: bytes) -> None:
        """Changes the value. Takes effect at once, or as soon as etcd can be reached."""
        self._value = value
        self._stored.clear()
        self._changed.set()

    async def wait_stored(self, timeout_s: float) -> bool:
        """Waits until the present value is in etcd; False when that took too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._stored.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Keeps the key there until cancelled."""
        backoff = Backoff()
        while True:
            try:
                await self._grant_and_put()
                backoff.reset()
                self._complaint = ""
                await self._keep()
                log.warning("etcd lease lost; registering again", key=self._key.decode())
            except EtcdUnavailable as exc:
                log.debug("not registered in etcd", key=self._key.decode(), why=exc.message)
            except EtcdRefused as exc:
                if exc.message != self._complaint:
                    log.error("etcd refuses to register", key=self._key.decode(), why=exc.message)
                self._complaint = exc.message
            await backoff.pause()

    async def _grant_and_put(self) -> None:
        # etcd counts whole seconds, and forgets no lease under its election time earlier.
        request = pb.LeaseGrantRequest(TTL=max(1, round(self._ttl_s)))
        grant = await self._client.call(
            "lease grant", lambda c, m, t: c.lease.LeaseGrant(request, metadata=m, timeout=t)
        )
        self._lease = grant.ID
        self._changed.clear()
        value = self._value
        await self._client.put(self._key, value, lease=self._lease)
        self._mark(value)

    async def _keep(self) -> None:
        """Renews at a third of the TTL and stores new values; returns when the lease is gone."""
        renewed = time.monotonic()
        backoff = Backoff()
        pause_s = self._ttl_s / 3
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            try:
                if time.monotonic() - renewed >= self._ttl_s / 3 - 0.01:
                    if not await self._renew():
                        return
                    renewed = time.monotonic()
                self._changed.clear()
                await self._put_if_ours()
            except EtcdUnavailable:
                # The lease may well outlive the outage: etcd gives it a full TTL when it starts.
                await backoff.pause()
                self._changed.set()
            else:
                backoff.reset()

    async def _renew(self) -> bool:
        async def renew(connection: Connection, metadata: Metadata, timeout_s: float) -> int:
            call = connection.lease.LeaseKeepAlive(metadata=metadata, timeout=timeout_s)
            try:
                # The call's own deadline is not enough: grpc.aio's `write` never returns when the
                # connection breaks while the call is being made.
                async with asyncio.timeout(timeout_s + 0.2):
                    await send(call, pb.LeaseKeepAliveRequest(ID=self._lease))
                    answer = await call.read()
            except TimeoutError as exc:
                self._client.failed(connection, "a lease renewal was not answered")
                raise ConnectionError("no answer") from exc
            finally:
                call.cancel()
            if not isinstance(answer, pb.LeaseKeepAliveResponse):
                raise ConnectionError("etcd ended the stream")
            return answer.TTL

        try:
            return await self._client.call("lease keepalive", renew) > 0
        except ConnectionError as exc:
            raise EtcdUnavailable(f"etcd lease not renewed: {exc}") from exc

    async def _put_if_ours(self) -> None:
        """Stores the value unless another process of the same name has taken the key since."""
        value = self._value
        ours = pb.Compare(
            result=pb.Compare.EQUAL, target=pb.Compare.LEASE, key=self._key, lease=self._lease
        )
        absent = pb.Compare(
            result=pb.Compare.EQUAL, target=pb.Compare.VERSION, key=self._key, version=0
        )
        put = pb.RequestOp(request_put=pb.PutRequest(key=self._key, value=value, lease=self._lease))
        if self._stored.is_set():
            # Nothing new: only look whether somebody removed it.
            done = await self._client.txn([ours])
            if done.succeeded:
                return
        elif (await self._client.txn([ours], [put])).succeeded:
            self._mark(value)
            return
        if (await self._client.txn([absent], [put])).succeeded:
            self._mark(value)
        elif not self._complaint:
            self._complaint = "taken"
            log.error("another process has taken this name in etcd", key=self._key.decode())

    def _mark(self, value: bytes) -> None:
        if value is self._value:
            self._stored.set()

    async def revoke(self, timeout_s: float = 2.0) -> None:
        """Ends the lease, and with it the key (unless another process has taken it)."""
        if not self._lease:
            return
        request = pb.LeaseRevokeRequest(ID=self._lease)
        try:
            await self._client.call(
                "lease revoke",
                lambda c, m, t: c.lease.LeaseRevoke(request, metadata=m, timeout=t),
                timeout_s=timeout_s,
            )
        except (EtcdUnavailable, EtcdRefused) as exc:
            log.info("etcd lease left to expire", key=self._key.decode(), why=exc.message)


@asynccontextmanager
async def leased_key(
    client: EtcdClient, key: bytes, value: bytes, ttl_s: float
) -> AsyncIterator[LeasedKey]:
    """Keeps `key` in etcd while the context lasts, from as soon as etcd can be reached."""
    leased = LeasedKey(client, key, value, ttl_s)
    task = asyncio.create_task(leased.run(), name="etcd lease")
    try:
        yield leased
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("the etcd lease task died", exc_info=exc)
        await leased.revoke()
