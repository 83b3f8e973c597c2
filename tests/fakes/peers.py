"""Agents and calls of peers without NIXL and network: all in this process, at once or as told.

A read that hangs writes late: until its agent's end is over, bytes may still come. So memory that
is used again before the fence shows it.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from services.common.arena import Geometry
from services.kvbm.movers.helper import NixlFailed
from services.kvbm.movers.nixl_peers import RemotePiece
from services.kvbm.node import Node
from services.kvbm.tiers.exports import leading
from services.kvbm.tiers.port import Export, PeerError

_names = itertools.count(1)


class Fault(StrEnum):
    """What may happen to one read."""

    HANG = "hang"
    """It is not over by the deadline; it writes when its agent ends."""
    FAIL = "fail"
    """Half of it comes, then it is refused; the rest may still come until the agent's end."""
    FLIP = "flip"
    """A bit is turned round on the way."""
    DIE = "die"
    """The agent's process ends in the midst."""


@dataclass
class World:
    """All agents' memory, and the faults of the reads to come."""

    windows: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """By agent: address as it tells it, where that is in this process, and how long it is."""
    faults: list[Fault | None] = field(default_factory=list)
    """Of the next reads, in order."""
    reads: int = 0
    gate: asyncio.Semaphore | None = None
    """Each read waits here for its turn."""
    running: int = 0
    most_running: int = 0
    """Reads that were under way at a time."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Agents end when it is set; it is at first."""
    late: int = 0
    """Reads that wrote after their deadline."""

    def __post_init__(self) -> None:
        self.ending.set()

    def agent(self, reads_into: object = None) -> FakeAgent:
        """As PeerAgent is made."""
        return FakeAgent(self)


class FakeAgent:
    """Behaves as PeerAgent does."""

    def __init__(self, world: World) -> None:
        self.name = f"fake-{next(_names)}"
        self.metadata = self.name.encode()
        self.pid = 0
        self.alive = False
        self._world = world
        self._maps: list[tuple[mmap.mmap, int]] = []
        self._unwritten: list[Sequence[RemotePiece]] = []
        self._sources: list[str] = []

    async def start(self) -> None:
        self.alive = True

    async def map(self, fd: int, length: int) -> tuple[int, int]:
        self._check()
        memory = mmap.mmap(os.dup(fd), length)
        here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps.append((memory, here))
        # Not where it is in this process: nobody may take one for the other.
        told = 1 << 40 | len(self._maps) << 32
        self._world.windows.setdefault(self.name, {})[told] = here, length
        return len(self._maps), told

    async def know(self, metadata: bytes, timeout_s: float) -> str:
        self._check()
        name = metadata.decode()
        if name not in self._world.windows:
            raise NixlFailed("NIXL_ERR_BACKEND")
        return name

    async def read(
        self, agent: str, region: int, pieces: Sequence[RemotePiece], timeout_s: float
    ) -> None:
        self._check()
        world = self._world
        fault = world.faults.pop(0) if world.faults else None
        world.reads += 1
        world.running += 1
        world.most_running = max(world.most_running, world.running)
        try:
            await asyncio.sleep(0)
            if world.gate is not None:
                await world.gate.acquire()
            self._check()
        except asyncio.CancelledError:
            # Nobody waits for it any more: it goes on all the same.
            self._unwritten.append([(region, piece) for piece in pieces])  # type: ignore[list-item]
            raise
        finally:
            world.running -= 1
        self._sources.append(agent)
        if agent not in world.windows:
            raise NixlFailed("NIXL_ERR_REMOTE_DISCONNECT")
        if fault is None or fault is Fault.FLIP:
            for piece in pieces:
                self._copy(agent, region, piece)
            if fault is Fault.FLIP:
                _, here = self._maps[region - 1]
                (ctypes.c_ubyte * 1).from_address(here + pieces[0].offset + 77)[0] ^= 4
            return
        half = len(pieces) // 2
        for piece in pieces[:half]:
            self._copy(agent, region, piece)
        self._unwritten.append([(region, piece) for piece in pieces[half:]])  # type: ignore[list-item]
        if fault is Fault.HANG:
            raise TimeoutError(f"no end after {timeout_s:.1f} s")
        if fault is Fault.DIE:
            self.alive = False
        raise NixlFailed(f"fake: {fault}")

    def expect(self, seconds: float) -> None:
        """Nothing: what is shown is read at once."""

    def kill(self) -> None:
        self.alive = False

    async def end(self) -> None:
        self.kill()
        await self._world.ending.wait()
        # The last moment before it is dead: what was under way arrives, garbled.
        for late in self._unwritten:
            for region, piece in late:  # type: ignore[misc]
                _, here = self._maps[region - 1]
                ctypes.memset(here + piece.offset, 0xEE, piece.length)
            self._world.late += 1
        self._unwritten.clear()
        self._world.windows.pop(self.name, None)

    async def close(self) -> None:
        await self.end()

    def _check(self) -> None:
        if not self.alive:
            raise NixlFailed("its process has ended")

    def _copy(self, agent: str, region: int, piece: RemotePiece) -> None:
        for told, (there, length) in self._world.windows[agent].items():
            if told <= piece.address and piece.address + piece.length <= told + length:
                _, here = self._maps[region - 1]
                source = there + piece.address - told
                ctypes.memmove(here + piece.offset, source, piece.length)
                return
        raise NixlFailed("NIXL_ERR_INVALID_PARAM: not registered")


class FakeCalls:
    """Calls between nodes in this process, by address."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self.away: set[str] = set()
        self.locates = 0
        self.exports = 0
        self.bad: list[bytes] = []
        self.refused: set[int] = set()
        """Numbers of exports, the first is 1, that fail."""
        self.held: dict[int, asyncio.Event] = {}
        """Numbers of exports that wait until this is set."""

    async def locate(
        self,
        address: str,
        namespace: bytes,
        geometry: Geometry,
        keys: Sequence[bytes],
        timeout_s: float,
    ) -> int:
        self.locates += 1
        space = self._node(address).spaces.get(namespace)
        return leading(space, keys) if space and space.geometry == geometry else 0

    async def export(
        self,
        address: str,
        namespace: bytes,
        geometry: Geometry,
        keys: Sequence[bytes],
        short_keys: Sequence[int],
        known_agent: str,
        timeout_s: float,
    ) -> Export:
        self.exports += 1
        number = self.exports
        await asyncio.sleep(0)
        if number in self.held:
            await self.held[number].wait()
        if number in self.refused:
            raise PeerError("unavailable: as the test would have it")
        node = self._node(address)
        space = node.spaces.get(namespace)
        assert node.peers is not None
        if space is None or space.geometry != geometry:
            return Export(0, 0, "", b"", (), 0)
        wanted = list(keys) or space.long_keys(short_keys)
        return await node.peers.exports.export(space, wanted, known_agent)

    async def end(
        self,
        address: str,
        exports: Sequence[int],
        namespace: bytes,
        bad_keys: Sequence[bytes],
        timeout_s: float,
    ) -> None:
        node = self._node(address)
        assert node.peers is not None
        node.peers.exports.end(exports)
        self.bad += bad_keys

    async def close(self) -> None: ...

    def _node(self, address: str) -> Node:
        if address in self.away or address not in self.nodes:
            raise PeerError("unavailable: nobody answers")
        return self.nodes[address]
