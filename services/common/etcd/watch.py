"""A prefix of etcd's keys, followed for ever: listed, then watched; only differences are told.

After every break it proves that etcd is still the same: the prefix, read at the last revision that
was seen, must be what is known. Then the watch goes on after that revision and nothing was missed.
If the revision is compacted, not reached yet (etcd came back empty or from a backup) or reads
differently (another history), the prefix is listed again and the difference is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc
from etcdserverpb import kv_pb2
from etcdserverpb import rpc_pb2 as pb

from services.common.etcd.client import Backoff, EtcdClient, prefix_end
from services.common.etcd.config import EtcdRefused, EtcdUnavailable
from services.common.rpc.stream import StreamEnded, send
from services.common.telemetry.logging import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Put:
    """A key is new or has another value."""

    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Deleted:
    """A key is gone."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Listed:
    """The first list is complete. Told once."""


WatchEvent = Put | Deleted | Listed


@dataclass(slots=True)
class PrefixView:
    """What is known of a prefix at one revision. Pure: answers in, differences out."""

    revision: int = 0
    """Last revision that was seen whole; 0: never listed."""
    known: dict[bytes, bytes] = field(default_factory=dict)

    def listed(self, revision: int, now: Iterable[tuple[bytes, bytes]]) -> list[WatchEvent]:
        """Takes a complete list and tells what differs from what was known."""
        first = self.revision == 0
        fresh = dict(now)
        events: list[WatchEvent] = [Deleted(k) for k in self.known if k not in fresh]
        events += [Put(k, v) for k, v in fresh.items() if self.known.get(k) != v]
        self.known = fresh
        self.revision = revision
        return [*events, Listed()] if first else events

    def changed(self, key: bytes, value: bytes | None, revision: int) -> list[WatchEvent]:
        """Takes one watched change (None: deleted)."""
        self.revision = max(self.revision, revision)
        old = self.known.get(key)
        if value is None:
            self.known.pop(key, None)
            return [] if old is None else [Deleted(key)]
        self.known[key] = value
        return [] if old == value else [Put(key, value)]


async def watch_prefix(
    client: EtcdClient,
    prefix: bytes,
    *,
    progress_s: float = 5.0,
    stall_s: float = 5.0,
) -> AsyncGenerator[WatchEvent, None]:
    """Follows all keys with `prefix`; ends only by being closed or cancelled.

    After `progress_s` without news etcd is asked for a sign of life; without one in `stall_s` the
    connection is given up. etcd being away, restarted, emptied or compacted shows only as a
    difference, or as nothing.
    """
    view = PrefixView()
    backoff = Backoff()
    complaint = ""
    while True:
        try:
            for event in await _catch_up(client, prefix, view):
                yield event
            stream = _stream(client, prefix, view.revision + 1, progress_s, stall_s)
            async with aclosing(stream):
                async for response in stream:
                    backoff.reset()
                    complaint = ""
                    for change in response.events:
                        kv = change.kv
                        value = None if change.type == kv_pb2.Event.DELETE else kv.value
                        for event in view.changed(kv.key, value, kv.mod_revision):
                            yield event
        except EtcdUnavailable as exc:
            log.debug("etcd watch broken", prefix=prefix.decode(), why=exc.message)
        except EtcdRefused as exc:
            if exc.message != complaint:
                log.error("etcd watch refused", prefix=prefix.decode(), why=exc.message)
            complaint = exc.message
        await backoff.pause()


async def _catch_up(client: EtcdClient, prefix: bytes, view: PrefixView) -> list[WatchEvent]:
    end = prefix_end(prefix)
    if view.revision:
        try:
            then = await client.range(prefix, end, revision=view.revision)
        except EtcdRefused as exc:
            log.info("etcd lacks the last revision; listing again", why=exc.message)
        else:
            if {kv.key: kv.value for kv in then.kvs} == view.known:
                return []
            log.warning("etcd has another history; listing again", prefix=prefix.decode())
    now = await client.range(prefix, end)
    return view.listed(now.header.revision, ((kv.key, kv.value) for kv in now.kvs))


async def _stream(
    client: EtcdClient, prefix: bytes, start: int, progress_s: float, stall_s: float
) -> AsyncGenerator[pb.WatchResponse, None]:
    """What one watch from revision `start` brings.

    Raises EtcdUnavailable when the connection is lost or stalls. Returns when etcd cancelled the
    watch (compaction, a stale token): catching up and watching again is the answer.
    """
    connection = client.connection
    create = pb.WatchCreateRequest(key=prefix, range_end=prefix_end(prefix), start_revision=start)
    progress = pb.WatchRequest(progress_request=pb.WatchProgressRequest())
    call: _Call | None = None
    read: asyncio.Task[pb.WatchResponse | str] | None = None
    try:
        # hasleader: a member cut off from the others ends the watch instead of going silent.
        metadata = (*await client.metadata(connection), ("hasleader", "true"))
        call = connection.watch.Watch(metadata=metadata)
        await send(call, pb.WatchRequest(create_request=create), timeout_s=stall_s)
        asked = True
        while True:
            # A pending read is never cancelled: grpc.aio would end the whole call with it.
            read = read or asyncio.create_task(_read(call))
            await asyncio.wait({read}, timeout=stall_s if asked else progress_s)
            if not read.done():
                if asked:
                    raise _Lost(f"no sign of life for {stall_s} s")
                asked = True
                await send(call, progress, timeout_s=stall_s)
                continue
            response = read.result()
            read, asked = None, False
            if isinstance(response, str):
                raise _Lost(response)
            client.answered(connection)
            if response.canceled:
                if client.token_is_stale(response.cancel_reason):
                    client.forget_token()
                elif not response.compact_revision:
                    raise EtcdRefused(f"etcd ended a watch: {response.cancel_reason}")
                return
            if response.events:
                yield response
    except (grpc.aio.AioRpcError, StreamEnded, asyncio.CancelledError, _Lost) as exc:
        if isinstance(exc, asyncio.CancelledError) and not client.given_up(connection):
            raise
        why = exc.details() or exc.code().name if isinstance(exc, grpc.RpcError) else str(exc)
        if client.token_is_stale(why):
            client.forget_token()
        client.failed(connection, why)
        raise EtcdUnavailable(f"etcd watch lost: {why}") from exc
    finally:
        if call is not None:
            call.cancel()
        if read is not None:
            await asyncio.wait({read})


class _Lost(Exception):
    """The stream is over, and why."""


_Call = grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]


async def _read(call: _Call) -> pb.WatchResponse | str:
    try:
        response = await call.read()
    except grpc.aio.AioRpcError as exc:
        return exc.details() or exc.code().name
    except asyncio.CancelledError:
        return "the call was ended"
    return response if isinstance(response, pb.WatchResponse) else "etcd ended the stream"
