"""Blocks for peers: copies of them in a window that peers may read, and never the arena itself.

A copy is made under a lease, from memory to memory. What a peer makes of it, it verifies: nothing
here knows when a peer reads, or whether it still does.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

from services.common.events.model import Tier
from services.common.telemetry.logging import get_logger
from services.kvbm.core.model import ReadyBlock, sealed_header
from services.kvbm.core.window import Piece, Window
from services.kvbm.metrics import KvbmMetrics
from services.kvbm.movers.helper import NixlFailed
from services.kvbm.movers.nixl_peers import MOST_PIECES, PeerAgent
from services.kvbm.movers.port import Memory
from services.kvbm.movers.staging import Buffer
from services.kvbm.space import Space
from services.kvbm.tiers.port import Export, Exported

MOST_KEYS = 4096
"""Blocks that one export may ask for."""
EXPIRES_S = 10.0
"""How long a reader has, from the moment at which the bytes are there."""
_SHARE = 0.25
"""Most of the window that one export gets: others find room, and reading overlaps with copying."""
_ROOM_S = 0.1
"""How long an export waits for room."""
_MOST_WAITING = 64
_RESTART_S = 1.0
"""Pause before an agent that has died is started again."""
log = get_logger(__name__)


class Exports:
    """The window and its agent. Loop's thread only."""

    def __init__(
        self,
        size: int,
        metrics: KvbmMetrics,
        now_ms: Callable[[], int],
        *,
        expires_s: float = EXPIRES_S,
        new_agent: Callable[[], PeerAgent] = PeerAgent,
    ) -> None:
        self.window = Window(size)
        self._metrics = metrics
        self._now_ms = now_ms
        self._expires_s = expires_s
        self._new_agent = new_agent
        self._agent: PeerAgent | None = None
        self._address = 0
        self._buffer: Buffer | None = None
        self._room = asyncio.Event()
        self._waiting = 0
        self._restarting: asyncio.Task[None] | None = None
        self._failed_s = float("-inf")

    @property
    def alive(self) -> bool:
        """Whether peers can read now."""
        return self._agent is not None and self._agent.alive

    @property
    def agent_pid(self) -> int:
        """Process that shows the window; 0: none."""
        return self._agent.pid if self._agent is not None else 0

    async def start(self) -> None:
        """Makes the window, and shows it. Raises NixlFailed, or OSError without memory."""
        if self._buffer is None:
            self._buffer = await asyncio.to_thread(Buffer, 0, self.window.size)
        agent = self._new_agent()
        try:
            await agent.start()
            _, self._address = await agent.map(self._buffer.fd, self._buffer.capacity)
            agent.expect(0.0)
        except BaseException:
            agent.kill()
            raise
        self._agent = agent

    async def close(self) -> None:
        """Nobody can read any more."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        if self._agent is not None:
            await self._agent.close()
            self._agent = None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    async def export(self, space: Space, keys: Sequence[bytes], known_agent: str) -> Export:
        """Copies the leading ones of `keys` that are in G2 into the window.

        `known_agent`: name of the agent that the caller knows how to reach.
        """
        now = self._now_ms()
        here = leading(space, keys)
        wanted = keys[:here]
        if not self.alive:
            self._restart()
            return Export(0, 0, "", b"", (), here, "agent-away")
        size = space.geometry.payload_bytes
        most = int(self.window.size * _SHARE) // size or int(self.window.size >= size)
        if not wanted or not most:
            return self._nothing(here, "block-too-large" if wanted else "")
        most = min(most, MOST_PIECES)
        space.catalog.touch(wanted[:most], now)
        lease_ms = int(self._expires_s * 1000)
        lease = space.catalog.lease(wanted[:most], 0, now + lease_ms, now)
        space.apply()
        id = secrets.randbits(63) or 1
        try:
            pieces = await self._take(id, size, len(lease.ready)) if lease.ready else []
            if not pieces or not self.alive:
                self.end([id])
                return self._nothing(here, "window-full" if self.alive else "agent-away")
            try:
                blocks = await self._fill(space, lease.ready[: len(pieces)], pieces)
            except BaseException:
                self.end([id])
                raise
        finally:
            space.catalog.release(lease.id, self._now_ms())
            space.apply()
        self.window.filled(id, time.monotonic() + self._expires_s)
        if self._agent is not None:
            self._agent.expect(self._expires_s)
        self._metrics.peer_moved("out", len(blocks), len(blocks) * size)
        assert self._agent is not None, "it lives"
        metadata = b"" if known_agent == self._agent.name else self._agent.metadata
        reason = "part" if len(blocks) < here else ""
        expires_ms = int(self._expires_s * 1000)
        return Export(id, expires_ms, self._agent.name, metadata, blocks, here, reason)

    def end(self, ids: Sequence[int]) -> int:
        """Ends exports; how many were known."""
        ended = sum(self.window.end(id) for id in ids)
        if ended:
            self._room.set()
            self._rest()
        return ended

    def expire(self) -> None:
        """Ends those whose time has come, and starts the agent again that has died."""
        if self.window.expire(time.monotonic()):
            self._room.set()
            self._rest()
        if self._agent is not None and not self._agent.alive:
            self._restart()

    def _rest(self) -> None:
        if self._agent is not None and not len(self.window):
            self._agent.expect(0.0)

    def _nothing(self, here: int, reason: str) -> Export:
        assert self._agent is not None, "it lives"
        return Export(0, 0, self._agent.name, b"", (), here, reason)

    async def _take(self, id: int, size: int, most: int) -> list[Piece]:
        """Room for some of the blocks; waits for it a little."""
        pieces = self.window.take(id, size, most)
        if pieces or self._waiting >= _MOST_WAITING:
            return pieces
        self._waiting += 1
        try:
            async with asyncio.timeout(_ROOM_S):
                while not pieces:
                    self._room.clear()
                    await self._room.wait()
                    pieces = self.window.take(id, size, most)
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1
        return pieces

    async def _fill(
        self, space: Space, ready: Sequence[ReadyBlock], pieces: Sequence[Piece]
    ) -> list[Exported]:
        buffer, base = self._buffer, self._address
        assert buffer is not None, "it was started"
        size = space.geometry.payload_bytes
        blocks, copies = [], []
        for block, piece in zip(ready, pieces, strict=True):
            meta = space.catalog.meta(block.key)
            if meta is None or meta.checksums != tuple(block.checksums):
                break  # forgotten this moment
            header = sealed_header(meta, block.ref.generation, size).pack(space.namespace)
            blocks.append(Exported(header, base + piece.offset, size))
            copies.append((piece.offset, space.arena.payload_address(block.ref.index)))

        def copy() -> None:
            for offset, address in copies:
                buffer.gather([Memory(address, size)], offset)

        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            try:
                await asyncio.to_thread(copy)
            finally:
                if not done.done():
                    done.set_result(None)

        # As the space's own work: it is not closed, and its arena not unmapped, before that ends.
        space.background(work(), "export")
        await asyncio.shield(done)
        return blocks

    def _restart(self) -> None:
        if self._restarting is not None and not self._restarting.done():
            return
        if self._buffer is None or time.monotonic() - self._failed_s < _RESTART_S:
            return
        self._restarting = asyncio.create_task(self._again(), name="kvbm export agent")

    async def _again(self) -> None:
        log.warning("the agent of the export window has died; another is started")
        try:
            if self._agent is not None:
                await self._agent.close()
            await self.start()
        except (NixlFailed, OSError) as exc:
            self._failed_s = time.monotonic()
            log.warning("blocks can't be shown to peers", why=str(exc))


def leading(space: Space, keys: Sequence[bytes]) -> int:
    """How many of these, from the first on, are in G2."""
    count = 0
    for key in keys:
        if Tier.G2 not in space.catalog.tiers_of(key):
            break
        count += 1
    return count
