"""Peers: daemons of other nodes, and one agent for each that is read from.

The agent of a peer is its fence: whatever fails or takes too long ends that agent's process, and
until it is dead the memory of its reads belongs to nobody. Another one is made when it is needed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from services.common.arena import Arena
from services.common.telemetry.logging import get_logger
from services.kvbm.core.peers import PeerBook, PeerId, PeerInfo
from services.kvbm.metrics import KvbmMetrics
from services.kvbm.movers.helper import NixlFailed
from services.kvbm.movers.nixl_peers import PeerAgent, RemotePiece
from services.kvbm.tiers.exports import Exports
from services.kvbm.tiers.port import Export, PeerCalls, PeerError

TRANSFER = "nixl"
"""What a daemon's record says when others can read from it."""
IDLE_S = 60.0
"""An agent that nothing was read by for so long is ended."""
MOST_LINKS = 16
"""Agents at a time; beyond that the one used longest ago is ended."""
LANES = 2
"""Fetches from one peer at a time."""
_CONNECT_S = 5.0
_TRIES = 3
_TRY_AGAIN_S = 0.1
log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Link:
    """One agent, for one life of one peer's agent."""

    peer: PeerId
    agent: PeerAgent
    remote: str
    """Name of the peer's agent."""
    regions: dict[bytes, int] = field(default_factory=dict)
    """Arenas that it may write into, by namespace."""
    mapping: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    reading: int = 0
    """Reads under way."""
    used_s: float = 0.0
    ending: asyncio.Task[None] | None = None


class Unfinished(PeerError):
    """A read has failed, and may still write until `fence` was awaited."""

    def __init__(self, why: str, fence: Awaitable[None]) -> None:
        super().__init__(why)
        self.fence = fence


@dataclass(slots=True)
class Tallies:
    """What came of fetches from one peer."""

    blocks: int = 0
    failures: int = 0


class Peers:
    """All peers of a daemon. Loop's thread only. `start` first; `exports` may be used after that.

    `state` says in words whether it works.
    """

    def __init__(
        self,
        book: PeerBook,
        calls: PeerCalls,
        exports: Exports,
        metrics: KvbmMetrics,
        *,
        timeout_s: float,
        new_agent: Callable[[], PeerAgent] = PeerAgent,
    ) -> None:
        self.book = book
        self.calls = calls
        self.exports = exports
        self.timeout_s = timeout_s
        self.state = "off: not started"
        self.works = False
        self.tallies: dict[PeerId, Tallies] = {}
        self.changed: list[Callable[[PeerId], None]] = []
        """Called when a peer lives anew: what was measured of it holds no more."""
        self._metrics = metrics
        self._new_agent = new_agent
        self._links: dict[PeerId, Link] = {}
        self._metadata: dict[str, bytes] = {}
        """How agents are reached that were read from, by their names."""
        self._ending: set[asyncio.Task[None]] = set()
        self._connecting: dict[PeerId, asyncio.Lock] = {}
        self._lanes: dict[PeerId, asyncio.Semaphore] = {}
        self._spare: asyncio.Task[PeerAgent] | None = None
        self._closed = False

    @property
    def agents(self) -> int:
        """Agents that may read, those among them that are being ended."""
        return len(self._links) + len(self._ending)

    def connected(self, peer: PeerId) -> bool:
        """Whether an agent for it stands ready."""
        return peer in self._links

    def agent_pids(self) -> list[int]:
        """Processes of the agents that read."""
        return [link.agent.pid for link in self._links.values()]

    async def start(self) -> None:
        """Shows the window. A failure is told in `state`."""
        try:
            await self.exports.start()
        except (NixlFailed, OSError) as exc:
            self.state = f"failed: {exc}"
            log.warning("no blocks are exchanged with other nodes", why=str(exc))
            return
        self.works = True
        self.state = f"ok: {TRANSFER}-ucx"

    async def close(self) -> None:
        """Ends all agents, and waits for their ends."""
        self._closed = True
        for link in list(self._links.values()):
            self._drop(link)
        if self._ending:
            await asyncio.wait(self._ending, timeout=_CONNECT_S)
        if self._spare is not None:
            self._spare.cancel()
            await asyncio.wait([self._spare])
            if not self._spare.cancelled() and self._spare.exception() is None:
                await self._spare.result().close()
        await self.exports.close()
        await self.calls.close()

    # What discovery tells.

    def record(self, info: PeerInfo) -> None:
        """A peer's record came or changed."""
        if self.book.record(info):
            log.info("peer lives anew", peer=info.id, address=info.address)
            link = self._links.get(info.id)
            if link is not None:
                self._drop(link)
            for tell in self.changed:
                tell(info.id)

    def gone(self, peer: PeerId, incarnation: int) -> None:
        """A peer's record went: a hint."""
        self.book.record_vanished(peer, incarnation)

    # Reading.

    def lane(self, peer: PeerId) -> asyncio.Semaphore:
        """Bounds what goes on with one peer at a time."""
        return self._lanes.setdefault(peer, asyncio.Semaphore(LANES))

    def address(self, peer: PeerId) -> str:
        """Its gRPC address. Raises PeerError for one that is not known any more."""
        info = self.book.info(peer)
        if info is None:
            raise PeerError("unknown: this peer has gone")
        return info.address

    def remote_agent(self, peer: PeerId) -> str:
        """Name of the peer's agent that is connected; empty: none."""
        link = self._links.get(peer)
        return link.remote if link is not None else ""

    async def connect(self, peer: PeerId, export: Export, arena: Arena) -> Link:
        """The peer's link, as the export says to reach it, with the arena mapped.

        Its user count is raised: `leave` it. Raises PeerError.
        """
        lock = self._connecting.setdefault(peer, asyncio.Lock())
        async with lock:
            link = self._links.get(peer)
            if link is not None and link.remote != export.agent:
                self._drop(link)  # the peer, or its agent, has started anew
                link = None
            if link is None:
                metadata = export.metadata or self._metadata.get(export.agent, b"")
                link = await self._link(peer, metadata)
                self._metadata[export.agent] = metadata
                while len(self._metadata) > 2 * MOST_LINKS:
                    self._metadata.pop(next(iter(self._metadata)))
            link.users += 1
            link.used_s = time.monotonic()
        try:
            await self._map(link, arena)
        except BaseException:
            self.leave(link)
            raise
        return link

    def leave(self, link: Link) -> None:
        """A user of a link is done with it."""
        link.users -= 1
        link.used_s = time.monotonic()

    async def read(
        self, link: Link, arena: Arena, pieces: Sequence[tuple[int, int, int]], timeout_s: float
    ) -> None:
        """Reads into arena slots: (slot, address at the peer, length) each.

        It has `timeout_s` for itself, and for each of those that are under way before it.

        Raises Unfinished; also when it is cancelled nothing is known of its end, and the link is
        ended.
        """
        remote = [
            RemotePiece(arena.payload_address(slot) - arena.address, address, length)
            for slot, address, length in pieces
        ]
        link.reading += 1
        try:
            timeout_s *= link.reading
            await link.agent.read(link.remote, link.regions[arena.namespace], remote, timeout_s)
        except TimeoutError as exc:
            raise Unfinished(f"timeout: {exc}", self._drop(link)) from exc
        except NixlFailed as exc:
            # Of a read that has failed in part, the other parts may go on.
            raise Unfinished(f"nixl: {exc}", self._drop(link)) from exc
        except BaseException:
            self._drop(link)
            raise
        finally:
            link.reading -= 1

    def fence(self, link: Link) -> Awaitable[None]:
        """Ends a link; by the time this was awaited nothing of it writes any more."""
        return self._drop(link)

    async def forget(self, namespace: bytes) -> None:
        """An arena is to be unmapped: ends all agents that know it."""
        ends = [
            self._drop(link) for link in list(self._links.values()) if namespace in link.regions
        ]
        if ends:
            await asyncio.gather(*ends)

    def tidy(self) -> None:
        """Ends agents that nobody has used for a while; makes one in advance."""
        if self.works and len(self.book):
            self._make_spare()
        now = time.monotonic()
        for link in list(self._links.values()):
            idle = not link.users and now - link.used_s > IDLE_S
            if idle or not link.agent.alive:
                self._drop(link)

    def tally(self, peer: PeerId, blocks: int, *, failed: bool = False) -> None:
        """Counts a fetch, for people."""
        if len(self.tallies) > 4096:
            self.tallies.pop(next(iter(self.tallies)))
        tally = self.tallies.setdefault(peer, Tallies())
        tally.blocks += blocks
        tally.failures += failed

    # Inside.

    async def _link(self, peer: PeerId, metadata: bytes) -> Link:
        if not metadata:
            raise PeerError("stale: its agent has changed")
        if len(self._links) >= MOST_LINKS:
            idle = [link for link in self._links.values() if not link.users]
            if not idle:
                raise PeerError(f"busy: {MOST_LINKS} peers are read from already")
            self._drop(min(idle, key=lambda link: link.used_s))
        began = time.monotonic()
        agent = await self._agent()
        try:
            for number in range(_TRIES):
                try:
                    name = await agent.know(metadata, _CONNECT_S)
                    break
                except NixlFailed:
                    # A peer that was stopped, or has just begun, may refuse the first try.
                    if number == _TRIES - 1:
                        raise
                    await asyncio.sleep(_TRY_AGAIN_S)
        except NixlFailed as exc:
            agent.kill()
            raise PeerError(f"nixl: {exc}") from exc
        except BaseException:
            agent.kill()
            raise
        if self._closed:
            agent.kill()
            raise PeerError("closed")
        link = self._links[peer] = Link(peer, agent, name, used_s=time.monotonic())
        log.info("connected to a peer", peer=peer, seconds=round(time.monotonic() - began, 3))
        return link

    async def _agent(self) -> PeerAgent:
        """One that has been started: the spare, if it is there."""
        spare, self._spare = self._spare, None  # `tidy` makes the next: not now, when it is urgent
        if spare is not None:
            try:
                agent = await spare
                if agent.alive:
                    return agent
            except NixlFailed as exc:
                log.warning("a spare agent did not start", why=str(exc))
        try:
            return await self._started()
        except NixlFailed as exc:
            raise PeerError(f"nixl: {exc}") from exc

    def _make_spare(self) -> None:
        if self._spare is None and not self._closed:
            self._spare = asyncio.create_task(self._started(), name="kvbm spare agent")

    async def _started(self) -> PeerAgent:
        agent = self._new_agent()
        try:
            await agent.start()
        except BaseException:
            agent.kill()
            raise
        return agent

    async def _map(self, link: Link, arena: Arena) -> None:
        async with link.mapping:
            if arena.namespace in link.regions:
                return
            try:
                fd = os.open(arena.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    region, _ = await link.agent.map(fd, arena.length)
                finally:
                    os.close(fd)
            except (NixlFailed, OSError) as exc:
                self._drop(link)
                raise PeerError(f"nixl: {exc}") from exc
            link.regions[arena.namespace] = region

    def _drop(self, link: Link) -> Awaitable[None]:
        """Ends a link; the answer can be awaited, and by then nothing of it writes any more."""
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        if link.ending is None:
            link.agent.kill()
            link.ending = asyncio.create_task(self._end(link), name="kvbm peer fence")
            self._ending.add(link.ending)
            link.ending.add_done_callback(self._ending.discard)
        return asyncio.shield(link.ending)

    async def _end(self, link: Link) -> None:
        began = time.monotonic()
        await link.agent.end()
        self._metrics.peer_fenced(time.monotonic() - began)
