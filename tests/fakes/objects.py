"""A store of objects in memory, with trouble on request."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence

from services.kvbm.movers.objects import MISSING, SKIP, Entry, StoreError, told, view
from services.kvbm.movers.port import Memory, Moved, ObjectPiece


class MemoryObjects:
    """Objects in a dict. `trouble` is asked before each request, by its verb and key."""

    def __init__(self) -> None:
        self.place = "memory"
        self.name = "memory"
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.requests: list[tuple[str, str]] = []
        self.trouble: Callable[[str, str], StoreError | None] = lambda verb, key: None
        self.flowing = asyncio.Event()
        """Cleared: every request hangs."""
        self.flowing.set()
        self.clock: Callable[[], float] = time.time

    async def open(self, timeout_s: float) -> None:
        await self._ask("open", "", timeout_s)

    async def get(self, pieces: Sequence[ObjectPiece], timeout_s: float) -> Moved:
        return Moved(await asyncio.gather(*(self._get(piece, timeout_s) for piece in pieces)))

    async def put(self, pieces: Sequence[ObjectPiece], timeout_s: float) -> Moved:
        return Moved(await asyncio.gather(*(self._put(piece, timeout_s) for piece in pieces)))

    async def register(self, memory: Memory) -> None:
        pass

    async def forget(self, memory: Memory) -> None:
        pass

    async def size(self, key: str, timeout_s: float) -> Entry | None:
        await self._ask("size", key, timeout_s)
        found = self.objects.get(key)
        return None if found is None else Entry(key, len(found[0]), found[1])

    async def read(self, key: str, timeout_s: float) -> bytes | None:
        await self._ask("read", key, timeout_s)
        found = self.objects.get(key)
        return None if found is None else found[0]

    async def write(self, key: str, data: bytes, timeout_s: float, *, absent: bool = False) -> bool:
        await self._ask("write", key, timeout_s)
        if absent and key in self.objects:
            return False
        self.objects[key] = (bytes(data), self.clock())
        return True

    async def delete(self, keys: Sequence[str], timeout_s: float) -> None:
        for key in keys:
            await self._ask("delete", key, timeout_s)
            self.objects.pop(key, None)

    async def entries(self, prefix: str, timeout_s: float) -> AsyncIterator[Sequence[Entry]]:
        await self._ask("entries", prefix, timeout_s)
        yield [
            Entry(key, len(data), modified)
            for key, (data, modified) in self.objects.items()
            if key.startswith(f"{prefix}/")
        ]

    async def folders(self, timeout_s: float) -> Sequence[str]:
        await self._ask("folders", "", timeout_s)
        return sorted({key.partition("/")[0] for key in self.objects})

    async def close(self) -> None:
        pass

    async def _get(self, piece: ObjectPiece, timeout_s: float) -> str | None:
        try:
            await self._ask("get", piece.key, timeout_s)
        except StoreError as exc:
            return told(exc)
        found = self.objects.get(piece.key)
        if found is None:
            return MISSING
        data, at = found[0], 0
        if len(data) < piece.length:
            return f"short: {len(data)} of {piece.length} bytes"
        for part in piece.parts:
            if part.address != SKIP:
                view(part)[:] = data[at : at + part.length]
            at += part.length
        return None

    async def _put(self, piece: ObjectPiece, timeout_s: float) -> str | None:
        try:
            await self._ask("put", piece.key, timeout_s)
        except StoreError as exc:
            return told(exc)
        data = b"".join(view(part) for part in piece.parts)
        self.objects[piece.key] = (data, self.clock())
        return None

    async def _ask(self, verb: str, key: str, timeout_s: float) -> None:
        self.requests.append((verb, key))
        try:
            async with asyncio.timeout(timeout_s):
                await self.flowing.wait()
        except TimeoutError:
            raise StoreError(f"no answer in {timeout_s:.1f} s", away=True) from None
        if (error := self.trouble(verb, key)) is not None:
            raise error


def now_and_then(seed: int, share: float) -> Callable[[str, str], StoreError | None]:
    """Trouble for that share of requests, the same for equal seeds."""
    chance = random.Random(seed)

    def trouble(verb: str, key: str) -> StoreError | None:
        return StoreError("answers 500", away=True) if chance.random() < share else None

    return trouble
