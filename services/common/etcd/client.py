"""One etcd cluster over one channel at a time: failover, deadlines, user and password, TLS.

Every call has a deadline and tries the members in turn inside it. Writes here are idempotent (a put
or a grant repeated has the same effect), so a call whose answer was lost is simply made again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
from etcdserverpb import rpc_pb2 as pb
from etcdserverpb import rpc_pb2_grpc as stubs

from services.common.etcd.config import EtcdConfig, EtcdRefused, EtcdUnavailable, credentials
from services.common.rpc.channel import CHANNEL_OPTIONS
from services.common.telemetry.logging import get_logger

log = get_logger(__name__)

_R = TypeVar("_R")
Metadata = tuple[tuple[str, str], ...]

_AWAY = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old", "user name is empty")
# etcd closes connections that ping without a call in progress.
_OPTIONS = (
    *(o for o in CHANNEL_OPTIONS if o[0] != "grpc.keepalive_permit_without_calls"),
    ("grpc.keepalive_permit_without_calls", 0),
)


class Backoff:
    """Growing pauses with full jitter: up to `first_s`, doubled each time, up to `most_s`."""

    def __init__(self, first_s: float = 0.1, most_s: float = 2.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._ceiling_s = first_s

    def reset(self) -> None:
        """Starts again with a short pause."""
        self._ceiling_s = self._first_s

    async def pause(self) -> None:
        """Waits the next pause; never less than a tenth of it, so that nobody spins."""
        await asyncio.sleep(self._ceiling_s * random.uniform(0.1, 1.0))
        self._ceiling_s = min(self._most_s, self._ceiling_s * 2)


class Connection:
    """A channel to one member, and its stubs."""

    def __init__(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.kv = stubs.KVStub(channel)
        self.watch = stubs.WatchStub(channel)
        self.lease = stubs.LeaseStub(channel)
        self.auth = stubs.AuthStub(channel)


class EtcdClient:
    """Calls to one etcd cluster. Loop's thread only; use `open_etcd`."""

    def __init__(self, config: EtcdConfig, credentials: grpc.ChannelCredentials | None) -> None:
        if not config.endpoints:
            raise ValueError("etcd needs at least one endpoint")
        self._config = config
        self._credentials = credentials
        # Each process begins elsewhere, so that members share the load.
        self._next = random.randrange(len(config.endpoints))
        self._connection: Connection | None = None
        self._token: str | None = None
        self._authenticating = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self.connected = False
        """Whether the last thing asked of etcd was answered."""

    @property
    def connection(self) -> Connection:
        """The connection in use; opened when there is none."""
        if self._connection is None:
            if self._closed:
                raise EtcdUnavailable("the etcd client is closed")
            endpoints = self._config.endpoints
            endpoint = endpoints[self._next % len(endpoints)].split("://")[-1].rstrip("/")
            channel = (
                grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(endpoint, self._credentials, options=_OPTIONS)
            )
            self._connection = Connection(endpoint, channel)
        return self._connection

    def failed(self, connection: Connection, why: str) -> None:
        """Says that `connection` is no good: the next call goes to the next member.

        Calls that still run on it are cancelled; watches and leases then go on elsewhere.
        """
        if connection is not self._connection:
            return
        if self.connected:
            log.warning("etcd connection lost", endpoint=connection.endpoint, why=why)
        self.connected = False
        self._connection = None
        self._next += 1
        task = asyncio.get_running_loop().create_task(connection.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def answered(self, connection: Connection) -> None:
        """Says that `connection` works."""
        if connection is self._connection:
            if not self.connected:
                log.info("etcd connected", endpoint=connection.endpoint)
            self.connected = True

    def given_up(self, connection: Connection) -> bool:
        """Whether a CancelledError means that `connection` was given up, not that we shall stop.

        grpc.aio raises CancelledError in every call of a channel that is closed.
        """
        task = asyncio.current_task()
        stopping = self._closed or (task is not None and task.cancelling() > 0)
        return connection is not self._connection and not stopping

    async def call(
        self,
        what: str,
        make: Callable[[Connection, Metadata, float], Awaitable[_R]],
        *,
        timeout_s: float = 5.0,
    ) -> _R:
        """Makes a call on one member after the other until one answers.

        `make` gets the connection, the metadata and the seconds it may take.

        Raises EtcdUnavailable when none did within `timeout_s`, EtcdRefused when etcd says no.
        """
        deadline = time.monotonic() + timeout_s
        backoff = Backoff()
        tried = 0
        renewed = False
        while True:
            connection = self.connection
            left = deadline - time.monotonic()
            try:
                metadata = await self.metadata(connection, left)
                answer = await make(
                    connection, metadata, max(0.05, min(self._config.attempt_timeout_s, left))
                )
            except grpc.aio.AioRpcError as exc:
                details = exc.details() or exc.code().name
                if self.token_is_stale(details) and self._token is not None and not renewed:
                    renewed = True
                    self.forget_token()
                    continue
                if exc.code() not in _AWAY:
                    self.answered(connection)
                    raise EtcdRefused(f"etcd refused {what}: {details}") from exc
                self.failed(connection, details)
                tried += 1
                # All members are tried at once; pauses come between rounds.
                if tried % len(self._config.endpoints) == 0:
                    if time.monotonic() + 0.1 >= deadline:
                        raise EtcdUnavailable(f"etcd did not answer {what}: {details}") from exc
                    await backoff.pause()
                if time.monotonic() >= deadline:
                    raise EtcdUnavailable(f"etcd did not answer {what}: {details}") from exc
            except asyncio.CancelledError:
                if not self.given_up(connection):
                    raise
                if time.monotonic() >= deadline:
                    raise EtcdUnavailable(f"etcd did not answer {what}: connection lost") from None
            else:
                self.answered(connection)
                return answer

    async def metadata(self, connection: Connection, timeout_s: float = 5.0) -> Metadata:
        """Call metadata: the token, fetched when there is none; empty without a user.

        Raises grpc.aio.AioRpcError or EtcdRefused like the call it is for.
        """
        if not self._config.user:
            return ()
        async with self._authenticating:
            if self._token is None:
                self._token = await self._authenticate(connection, timeout_s)
            return (("token", self._token),) if self._token else ()

    async def _authenticate(self, connection: Connection, timeout_s: float) -> str:
        request = pb.AuthenticateRequest(name=self._config.user, password=self._config.password)
        try:
            answer: pb.AuthenticateResponse = await connection.auth.Authenticate(
                request, timeout=max(0.05, min(self._config.attempt_timeout_s, timeout_s))
            )
        except grpc.aio.AioRpcError as exc:
            if "authentication is not enabled" in (exc.details() or ""):
                log.warning("etcd has authentication off; its user and password are not used")
                return ""
            if exc.code() in _AWAY:
                raise
            raise EtcdRefused(
                f"etcd refused user {self._config.user!r}: {exc.details()}", reason="ETCD_AUTH"
            ) from exc
        return answer.token

    def forget_token(self) -> None:
        """Drops the token; the next call fetches a new one."""
        self._token = None

    @staticmethod
    def token_is_stale(details: str) -> bool:
        """Whether etcd's words mean that the token is no longer (or not yet) good."""
        return any(words in details for words in _STALE_TOKEN)

    async def range(
        self, key: bytes, range_end: bytes = b"", *, revision: int = 0
    ) -> pb.RangeResponse:
        """Keys from `key` up to `range_end` (one key when empty), as of `revision` (0: now)."""
        request = pb.RangeRequest(key=key, range_end=range_end, revision=revision)
        return await self.call("range", lambda c, m, t: c.kv.Range(request, metadata=m, timeout=t))

    async def put(self, key: bytes, value: bytes, *, lease: int = 0) -> pb.PutResponse:
        """Sets a key, under a lease when one is given."""
        request = pb.PutRequest(key=key, value=value, lease=lease)
        return await self.call("put", lambda c, m, t: c.kv.Put(request, metadata=m, timeout=t))

    async def delete(self, key: bytes, range_end: bytes = b"") -> pb.DeleteRangeResponse:
        """Removes a key or a range."""
        request = pb.DeleteRangeRequest(key=key, range_end=range_end)
        return await self.call(
            "delete", lambda c, m, t: c.kv.DeleteRange(request, metadata=m, timeout=t)
        )

    async def txn(
        self,
        compare: Sequence[pb.Compare],
        success: Sequence[pb.RequestOp] = (),
        failure: Sequence[pb.RequestOp] = (),
    ) -> pb.TxnResponse:
        """`success` when all comparisons hold, else `failure`, atomically."""
        request = pb.TxnRequest(compare=compare, success=success, failure=failure)
        return await self.call("txn", lambda c, m, t: c.kv.Txn(request, metadata=m, timeout=t))

    async def close(self) -> None:
        """Closes all channels; idempotent."""
        self._closed = True
        connection, self._connection = self._connection, None
        self.connected = False
        if connection is not None:
            await connection.channel.close()
        await asyncio.gather(*self._closing)


def prefix_end(prefix: bytes) -> bytes:
    """The range end that makes a range of all keys with `prefix` (not empty, not all 0xff)."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1])


@asynccontextmanager
async def open_etcd(config: EtcdConfig) -> AsyncIterator[EtcdClient]:
    """A client for the cluster; connects when first used. Raises EtcdRefused for bad TLS files."""
    client = EtcdClient(config, credentials(config))
    try:
        yield client
    finally:
        await client.close()
