"""Objects in an S3 bucket. Small requests by obstore; payloads by NIXL where that works."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from services.common.telemetry.logging import get_logger
from services.kvbm.movers.helper import NixlFailed
from services.kvbm.movers.nixl_objects import NixlCourier, Way
from services.kvbm.movers.objects import MISSING, Entry, StoreError, told
from services.kvbm.movers.port import Memory, Moved, ObjectPiece
from services.kvbm.movers.staging import Buffer, Staging, scatter

if TYPE_CHECKING:
    from obstore.store import S3Config

log = get_logger(__name__)
T = TypeVar("T")
_MOVES_AT_ONCE = 4
_REQUESTS_AT_ONCE = 32
_START_S = 20.0
_AGAIN_S = 30.0
"""Pause before NIXL is tried again after it failed where obstore works."""
_STRIKES = 3
_WRONG_KEYS = ("SignatureDoesNotMatch", "InvalidAccessKeyId", "AuthorizationHeaderMalformed")


@dataclass(frozen=True, slots=True)
class S3Place:
    """A bucket, a prefix in it, and how to get there."""

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    """http(s)://host:port; empty: AWS."""
    region: str = "us-east-1"
    access_key: str = ""
    """Empty: the environment's, or this machine's role."""
    secret_key: str = ""

    def full(self, key: str) -> str:
        """The key with the prefix."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def __repr__(self) -> str:
        return f"S3Place({self})"

    def __str__(self) -> str:
        where = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/") + where


class S3Objects:
    """Implements Objects. Memory of callers is only touched by copies that end at once."""

    def __init__(self, place: S3Place, *, nixl: bool, timeout_s: float) -> None:
        self.place = str(place)
        self.name = "obstore"
        self._at = place
        self._store = _client(place, timeout_s)
        self._nixl = nixl
        self._courier: NixlCourier | None = None
        self._former: list[NixlCourier] = []
        """Those that are being ended."""
        self._starting: asyncio.Task[None] | None = None
        self._again_at = 0.0
        self._strikes = 0
        self._staging = Staging(_MOVES_AT_ONCE, self._forget)
        self._requests = asyncio.Semaphore(_REQUESTS_AT_ONCE)
        self._id = secrets.token_hex(8)

    async def open(self, timeout_s: float) -> None:
        """See Objects."""
        probe = f"probe/{self._id}"
        await self.write(probe, probe.encode(), timeout_s)
        if await self.read(probe, timeout_s) != probe.encode():
            raise StoreError("it returns other bytes than were written")
        await self.delete([probe], timeout_s)
        self._again_at = 0.0
        self._hire()
        if self._starting is not None:
            await asyncio.wait([self._starting], timeout=timeout_s)

    async def get(self, pieces: Sequence[ObjectPiece], timeout_s: float) -> Moved:
        """See ObjectMover; never a fence."""
        return Moved(await asyncio.gather(*(self._move(self._get, p, timeout_s) for p in pieces)))

    async def put(self, pieces: Sequence[ObjectPiece], timeout_s: float) -> Moved:
        """See ObjectMover; never a fence."""
        return Moved(await asyncio.gather(*(self._move(self._put, p, timeout_s) for p in pieces)))

    async def register(self, memory: Memory) -> None:
        """See ObjectMover; there is nothing to do."""

    async def forget(self, memory: Memory) -> None:
        """See ObjectMover; there is nothing to do."""

    async def size(self, key: str, timeout_s: float) -> Entry | None:
        """See Objects."""
        try:
            meta = await self._ask(lambda: obstore.head_async(self._store, key), timeout_s)
        except FileNotFoundError:
            return None
        return Entry(key, meta["size"], meta["last_modified"].timestamp())

    async def read(self, key: str, timeout_s: float) -> bytes | None:
        """See Objects."""

        async def read() -> bytes:
            return bytes(await (await obstore.get_async(self._store, key)).bytes_async())

        try:
            return await self._ask(read, timeout_s)
        except FileNotFoundError:
            return None

    async def write(self, key: str, data: bytes, timeout_s: float, *, absent: bool = False) -> bool:
        """See Objects. `absent` needs conditional puts, which AWS and most others have."""
        try:
            await self._upload(key, data, timeout_s, "create" if absent else "overwrite")
        except AlreadyExistsError:
            return False
        return True

    async def delete(self, keys: Sequence[str], timeout_s: float) -> None:
        """See Objects."""
        with contextlib.suppress(FileNotFoundError):
            await self._ask(lambda: obstore.delete_async(self._store, list(keys)), timeout_s)

    async def entries(self, prefix: str, timeout_s: float) -> AsyncIterator[Sequence[Entry]]:
        """See Objects."""
        chunks = aiter(obstore.list(self._store, prefix, chunk_size=1000))
        while True:
            try:
                chunk = await self._ask(lambda: anext(chunks), timeout_s)
            except (StopAsyncIteration, FileNotFoundError):
                return
            yield [Entry(m["path"], m["size"], m["last_modified"].timestamp()) for m in chunk]

    async def folders(self, timeout_s: float) -> Sequence[str]:
        """See Objects."""
        try:
            found = await self._ask(
                lambda: obstore.list_with_delimiter_async(self._store), timeout_s
            )
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]

    async def close(self) -> None:
        """See Objects."""
        self._nixl = False
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._courier is not None:
            await self._courier.end()
        await asyncio.gather(*(courier.end() for courier in self._former))
        self._staging.close()

    # Moves.

    async def _move(
        self,
        move: Callable[[ObjectPiece, float], Awaitable[str | None]],
        piece: ObjectPiece,
        timeout_s: float,
    ) -> str | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await move(piece, time.monotonic() + timeout_s)
        except TimeoutError:
            return told(self._silent(timeout_s))
        except StoreError as exc:
            return told(exc)
        except FileNotFoundError:
            return MISSING
        except OSError as exc:
            return f"no memory to move it through: {exc.strerror}"

    async def _get(self, piece: ObjectPiece, deadline: float) -> str | None:
        if (courier := self._hire()) is not None:
            # NIXL says nothing of objects that are too short, and not why others failed.
            entry = await self.size(piece.key, deadline - time.monotonic())
            if entry is None:
                return MISSING
            if entry.size < piece.length:
                return f"short: {entry.size} of {piece.length} bytes"
            async with self._lent(piece.length) as buffer:
                if await self._carry(courier, "READ", buffer, piece):
                    await ended(lambda: scatter(buffer.address, piece.parts))
                    return None
        data = await self._ask(
            lambda: obstore.get_range_async(self._store, piece.key, start=0, length=piece.length),
            deadline - time.monotonic(),
        )
        if len(data) < piece.length:
            return f"short: {len(data)} of {piece.length} bytes"
        address = np.frombuffer(memoryview(data), np.uint8).ctypes.data
        await ended(lambda: scatter(address, piece.parts))
        self._blame(courier)
        return None

    async def _put(self, piece: ObjectPiece, deadline: float) -> str | None:
        async with self._lent(piece.length) as buffer:
            await ended(lambda: buffer.gather(piece.parts))
            courier = self._hire()
            if courier is not None and await self._carry(courier, "WRITE", buffer, piece):
                return None
            bytes_ = buffer.view[: piece.length]
            await self._upload(piece.key, bytes_, deadline - time.monotonic(), "overwrite")
        self._blame(courier)
        return None

    async def _carry(
        self, courier: NixlCourier, way: Way, buffer: Buffer, piece: ObjectPiece
    ) -> bool:
        """Moves by NIXL; False: it failed, for reasons that obstore will find out."""
        try:
            await courier.move(way, buffer, piece.length, self._at.full(piece.key))
        except NixlFailed as exc:
            log.info("NIXL did not move an object", object=piece.key, why=str(exc))
            buffer.tainted = not courier.alive
            return False
        self._strikes = 0
        return True

    @asynccontextmanager
    async def _lent(self, length: int) -> AsyncIterator[Buffer]:
        """A staging buffer; never used again when the move was cut off."""
        buffer = await self._staging.take(length)
        clean = False
        try:
            yield buffer
            clean = True
        finally:
            self._staging.give(buffer, reuse=clean)

    def _forget(self, buffer: Buffer) -> None:
        if self._courier is not None:
            self._courier.forget(buffer)

    # Whom moves go by.

    def _hire(self) -> NixlCourier | None:
        """Who carries; None: obstore has to, for now."""
        if self._courier is not None:
            if self._courier.alive:
                return self._courier
            self._dismiss("it ended")
        if self._nixl and self._starting is None and time.monotonic() >= self._again_at:
            self._again_at = time.monotonic() + _AGAIN_S
            self._starting = asyncio.create_task(self._start(), name="kvbm nixl-obj")
        return None

    def _dismiss(self, why: str) -> None:
        courier, self._courier = self._courier, None
        if courier is not None:
            log.warning("NIXL is given up; obstore moves objects", why=why, place=self.place)
            courier.kill()
            self._former = [*(c for c in self._former if not c.gone), courier]
        self.name = f"obstore: nixl-obj failed ({why})"
        self._strikes = 0

    def _blame(self, courier: NixlCourier | None) -> None:
        """obstore has moved what NIXL, if it was asked, had not."""
        if courier is None or courier is not self._courier:
            return
        self._strikes += 1
        if self._strikes >= _STRIKES:
            self._dismiss(f"{self._strikes} moves in a row that obstore made instead")

    async def _start(self) -> None:
        """Starts NIXL and tries it."""
        courier, why = NixlCourier(), ""
        try:
            async with asyncio.timeout(_START_S):
                await courier.start(self._at)
                why = await self._try(courier)
        except TimeoutError:
            why = f"no answer in {_START_S:g} s"
        except (NixlFailed, StoreError, OSError) as exc:
            why = str(exc)
        except asyncio.CancelledError:
            await courier.end()
            raise
        finally:
            self._starting = None
        if why:
            self.name = f"obstore: nixl-obj refused ({why})"
            log.warning("NIXL can't be used; obstore moves objects", why=why, place=self.place)
            await courier.end()
        else:
            self._courier, self._strikes = courier, 0
            self.name = "nixl-obj"

    async def _try(self, courier: NixlCourier) -> str:
        """Empty, or what is wrong."""
        key, data = f"probe/{self._id}-nixl", secrets.token_bytes(4096)
        async with self._lent(len(data)) as buffer:
            buffer.view[: len(data)] = data
            await courier.move("WRITE", buffer, len(data), self._at.full(key))
            buffer.view[: len(data)] = bytes(len(data))
            await courier.move("READ", buffer, len(data), self._at.full(key))
            same = buffer.view[: len(data)] == data
        await self.delete([key], _START_S)
        return "" if same else "other bytes came back than were written"

    # Requests.

    async def _upload(
        self,
        key: str,
        data: bytes | memoryview,
        timeout_s: float,
        mode: Literal["create", "overwrite"],
    ) -> None:
        try:
            await self._ask(
                lambda: obstore.put_async(self._store, key, data, mode=mode, use_multipart=False),
                timeout_s,
            )
        except FileNotFoundError as exc:
            raise StoreError("the bucket does not exist") from exc

    async def _ask(self, what: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """Raises StoreError, FileNotFoundError, AlreadyExistsError."""
        try:
            async with asyncio.timeout(timeout_s), self._requests:
                return await what()
        except TimeoutError:
            raise self._silent(timeout_s) from None
        except AlreadyExistsError:
            raise
        except (BaseError, ValueError) as exc:
            raise self._translated(exc) from exc

    def _silent(self, timeout_s: float) -> StoreError:
        hint = "" if self._at.access_key else ", with no access key set"
        return StoreError(f"no answer in {timeout_s:.1f} s{hint}", away=True)

    def _translated(self, exc: Exception) -> StoreError:
        words = str(exc)
        status = re.search(r"status code: (\d+)", words)
        found = re.search(r"<Code>(\w+)</Code>", words)
        code = found[1] if found else status[1] if status else ""
        if isinstance(exc, PermissionDeniedError | UnauthenticatedError):
            wrong = code in _WRONG_KEYS or not found
            why = "access key or secret key is wrong" if wrong else "the key lacks a right"
            return StoreError(f"{why} ({code})")
        if status and status[1] == "416":
            return StoreError("short: nothing lies in that range")
        if status:
            # Servers that are in trouble are left alone for a while, like those that are away.
            return StoreError(f"answers {code}", away=status[1][0] == "5")
        why = words.partition("\n")[0].rpartition(" - ")[2]
        return StoreError(f"can't be reached ({why})", away=True)


async def ended(call: Callable[[], None]) -> None:
    """Runs `call` in a thread and returns when it is over, also when cancelled meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(call))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled
    task.result()


def _client(place: S3Place, timeout_s: float) -> S3Store:
    config: S3Config = {"region": place.region}
    if place.endpoint:
        config["endpoint"] = place.endpoint
    if place.access_key:
        config["access_key_id"] = place.access_key
        config["secret_access_key"] = place.secret_key
    return S3Store(
        place.bucket,
        prefix=place.prefix or None,
        config=config,
        client_options={
            "allow_http": place.endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=min(5.0, timeout_s)),
            # Ours are the deadlines: each request has one, and is dropped then.
            "timeout": timedelta(seconds=timeout_s + 60),
        },
        retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=timeout_s)},
    )
