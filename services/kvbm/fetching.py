"""Blocks from peers: what one namespace fetches from the memory of other nodes.

In rounds: the peer copies some blocks into its window and says where; they are read into slots that
are being filled, verified there, and only then registered. While one round is read, the next waits
at the agent and the one after that is copied, so that no side waits for another. Whatever goes
wrong ends the fetch, and what has not come is a miss.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from services.common.arena import CorruptHeader, SlotHeader, SlotState
from services.common.blocks import block_key
from services.common.events.model import Tier
from services.common.telemetry.logging import get_logger
from services.kvbm.core.model import Copy, meta_of
from services.kvbm.core.odds import Odds
from services.kvbm.core.peers import PeerId
from services.kvbm.metrics import KvbmMetrics
from services.kvbm.space import Space
from services.kvbm.tiers.peer import Link, Peers, Unfinished
from services.kvbm.tiers.port import Export, PeerError
from services.kvbm.underway import Underway

ASK_S = 0.25
"""Longest wait for peers' answers to what they hold."""
END_S = 1.0
"""Longest wait when a peer is told that its export has been read; it also ends by itself."""
MOST_KEYS = 4096
"""Blocks that are asked for at a time."""
_FULL_TRIES = 2
"""How often a peer is asked again that has no room in its window."""
_READS = 2
"""Rounds that are being read: the second begins where the first ends."""
_ROUND_TRIP_S = 0.005
"""What a question to peers is thought to take before any was asked."""
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Consecutive blocks of a chain, by their full hashes or, when these aren't known, short."""

    short: Sequence[int]
    full: Sequence[bytes] = ()

    def __len__(self) -> int:
        return len(self.short)

    def after(self, count: int) -> Wanted:
        """Those from number `count` on."""
        return Wanted(self.short[count:], self.full[count:])

    def is_block(self, number: int, key: bytes) -> bool:
        """Whether this is the hash of its block of that number."""
        if self.full:
            return self.full[number] == key
        return self.short[number] == block_key(key)


def wanted(keys: Sequence[bytes]) -> Wanted:
    """Blocks whose full hashes are known."""
    return Wanted([block_key(key) for key in keys], keys)


@dataclass(slots=True)
class _Round:
    """Blocks of one export on their way into slots."""

    export: Export
    copies: list[tuple[Copy, SlotHeader, int, int]] = field(default_factory=list)
    """Each with its header, and address and length at the peer."""
    stop: str = ""
    """Why the fetch ends with it; empty: it goes on."""


class Fetches:
    """All fetches of one namespace. Loop's thread only."""

    def __init__(
        self, space: Space, peers: Peers, metrics: KvbmMetrics, now_ms: Callable[[], int]
    ) -> None:
        self._space = space
        self._peers = peers
        self._metrics = metrics
        self._now_ms = now_ms
        self._coming: dict[int, asyncio.Future[None]] = {}
        self.odds = Odds(round_trip_s=_ROUND_TRIP_S)
        """Whether to ask peers for what nobody has said that they hold."""
        self.running = 0
        self.quarantined = 0
        """Slots of reads whose agent isn't dead yet."""

    def coming(self, key: int) -> asyncio.Future[None] | None:
        """A fetch under way that a block (low 64 bits) may come by; done when it is over."""
        return self._coming.get(key)

    def holder(self, key: int) -> PeerId | None:
        """The peer that is said to hold a block, and that is of use now."""
        return self._peers.book.holder(key, time.monotonic()) if self._peers.works else None

    def may_ask(self, key: int) -> bool:
        """Whether there is anybody to ask, and not just now nobody had this block."""
        now_s = time.monotonic()
        book = self._peers.book
        return self._peers.works and book.any_usable(now_s) and not book.is_absent(key, now_s)

    # Asking.

    async def ask(self, keys: Sequence[bytes]) -> tuple[PeerId, int] | None:
        """The peer that holds most leading blocks, and how many; None: nobody has any."""
        book, space = self._peers.book, self._space
        began = time.monotonic()
        asked = book.to_ask(began)
        if not asked or not keys:
            return None
        keys = keys[:MOST_KEYS]
        calls = [
            self._peers.calls.locate(
                self._peers.address(peer), space.namespace, space.geometry, keys, ASK_S
            )
            for peer in asked
        ]
        best: tuple[PeerId, int] | None = None
        for peer, held in zip(
            asked, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(held, PeerError):
                self._failed(peer, str(held))
            elif isinstance(held, BaseException):
                raise held
            elif held and (best is None or held > best[1]):
                best = peer, held
        self.odds.heard(best is not None, time.monotonic() - began)
        self._metrics.peer_asked("found" if best else "missing")
        if best is None:
            book.absent(block_key(keys[0]), time.monotonic())
        else:
            short = [block_key(key) for key in keys[: best[1]]]
            book.hint(best[0], short, time.monotonic())
        return best

    # Fetching.

    def fetch(
        self, peer: PeerId, blocks: Wanted, arrived: Callable[[], None] = lambda: None
    ) -> Awaitable[int]:
        """Brings what it can of these from a peer into host memory; how many came.

        Begins at once, so that whoever looks for these blocks next knows that they are coming.
        `arrived` is called when some have come.
        """
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine = {key for key in blocks.short if self._coming.setdefault(key, over) is over}
        self.running += 1
        run = self._run(peer, blocks, arrived, mine, over)
        return asyncio.create_task(run, name=f"fetch from {peer}")

    async def _run(
        self,
        peer: PeerId,
        blocks: Wanted,
        arrived: Callable[[], None],
        mine: Collection[int],
        over: asyncio.Future[None],
    ) -> int:
        result = "internal"
        try:
            async with self._peers.lane(peer):
                came, result = await self._fetch(peer, blocks, arrived)
                return came
        finally:
            self.running -= 1
            for key in mine:
                del self._coming[key]
            over.set_result(None)
            self._metrics.peer_fetched(result.split(":")[0])

    async def _fetch(
        self, peer: PeerId, blocks: Wanted, arrived: Callable[[], None]
    ) -> tuple[int, str]:
        """How many came, and how it ended: "ok", or why not all."""
        began = time.monotonic()
        waited_s = 0.0
        checks: list[asyncio.Task[int]] = []
        reads = Underway(_READS, f"kvbm read from {peer}")
        asked = full = 0
        ahead: asyncio.Task[Export | PeerError] | None = None
        link: Link | None = None
        why = ""
        try:
            ahead = self._ask_export(peer, blocks)
            while ahead is not None and not why:
                export = await reads.beside(ahead)
                ahead = None
                if isinstance(export, PeerError):
                    await reads.drain()  # they come all the same
                    raise export
                taken = len(export.blocks)
                if export.reason == "window-full" and not taken and (reads or full < _FULL_TRIES):
                    # The peer has waited for room. That of our own rounds is free after them.
                    if reads:
                        await reads.one()
                    else:
                        full += 1
                    ahead = self._ask_export(peer, blocks.after(asked))
                    continue
                if not taken:
                    why = export.reason or "missing"
                    break
                full = 0
                try:
                    if link is None or link.remote != export.agent:
                        await reads.drain()
                        connecting = time.monotonic()
                        if link is not None:
                            self._peers.leave(link)
                            link = None
                        link = await self._peers.connect(peer, export, self._space.arena)
                        waited_s += time.monotonic() - connecting
                    begun = self._begin(blocks.after(asked), export)
                except BaseException:
                    self._end_export(peer, export)
                    raise
                asked += taken
                why = begun.stop
                if not why and asked < len(blocks) and export.available > taken:
                    ahead = self._ask_export(peer, blocks.after(asked))
                await reads.add(self._bring(peer, link, begun, checks, arrived))
            await reads.drain()
        except PeerError as exc:
            why = str(exc)
            self._failed(peer, why)
        finally:
            try:
                await reads.stop()
            finally:
                if link is not None:
                    self._peers.leave(link)
                if ahead is not None:
                    self._space.background(self._discard(peer, ahead), "late export")
            came = sum(await asyncio.gather(*checks)) if checks else 0
            seconds = time.monotonic() - began - waited_s
            self._learn(peer, blocks, came, seconds, why)
        if not why and asked < len(blocks):
            why = "missing"
        return came, why or "ok"

    def _learn(self, peer: PeerId, blocks: Wanted, came: int, seconds: float, why: str) -> None:
        space, now_s = self._space, time.monotonic()
        failed = why.split(":")[0] not in ("", "missing", "window-full", "no-room")
        if why.startswith("corrupt"):
            self._failed(peer, why)
        self._peers.tally(peer, came, failed=failed)
        if came:
            size = came * space.geometry.payload_bytes
            self._metrics.peer_moved("in", came, size, seconds)
            space.gate.observe(peer, came, seconds, now_s)
        elif failed:
            # A fetch that took its time and brought nothing is the dearest of all.
            space.gate.given_up(peer, len(blocks), seconds, now_s)
        if not failed:
            self._peers.book.worked(peer)
        if why == "missing" and not came:
            for key in blocks.short:
                self._peers.book.unhint(peer, key)

    def _ask_export(self, peer: PeerId, blocks: Wanted) -> asyncio.Task[Export | PeerError]:
        space, peers = self._space, self._peers

        async def ask() -> Export | PeerError:
            try:
                return await peers.calls.export(
                    peers.address(peer),
                    space.namespace,
                    space.geometry,
                    blocks.full[:MOST_KEYS],
                    () if blocks.full else blocks.short[:MOST_KEYS],
                    peers.remote_agent(peer),
                    peers.timeout_s,
                )
            except PeerError as exc:
                return exc

        return asyncio.create_task(ask(), name="kvbm ask export")

    def _begin(self, blocks: Wanted, export: Export) -> _Round:
        """Slots for the blocks of an export, as far as they are what was asked for."""
        space = self._space
        begun = _Round(export)
        for number, block in enumerate(export.blocks[: len(blocks)]):
            try:
                header = SlotHeader.unpack(block.header, space.namespace)
            except CorruptHeader as exc:
                begun.stop = f"corrupt: {exc}"
                break
            if (
                header.state is not SlotState.SEALED
                or not blocks.is_block(number, header.key)
                or len(header.checksums) != space.geometry.ranks
                or not header.payload_bytes == block.length == space.geometry.payload_bytes
            ):
                begun.stop = "corrupt: the header is another block's"
                break
            copy = space.catalog.begin_fetch(meta_of(header), self._now_ms(), source=Tier.PEER)
            if copy is not None:
                begun.copies.append((copy, header, block.address, block.length))
            elif not (
                Tier.G2 in space.catalog.tiers_of(header.key)
                or space.catalog.moving(header.key, Tier.G2)
            ):
                begun.stop = "no-room"
                break
        space.apply()
        return begun

    async def _bring(
        self,
        peer: PeerId,
        link: Link,
        begun: _Round,
        checks: list[asyncio.Task[int]],
        arrived: Callable[[], None],
    ) -> None:
        """Reads a round, and has it verified while others are read. Raises PeerError."""
        try:
            await self._read(link, begun)
        finally:
            # Also of a read that goes on: what it brings from now on nobody uses.
            self._end_export(peer, begun.export)
        if begun.copies:
            checks.append(asyncio.create_task(self._check(peer, begun, arrived)))

    async def _read(self, link: Link, begun: _Round) -> None:
        """Raises PeerError; then the slots are out of use until the link's agent is dead."""
        pieces = []
        for copy, _, address, length in begun.copies:
            assert copy.target_slot is not None, "host memory has slots"
            pieces.append((copy.target_slot.index, address, length))
        if not pieces:
            return
        try:
            await self._peers.read(link, self._space.arena, pieces, self._peers.timeout_s)
        except Unfinished as exc:
            self._quarantine(begun, exc.fence)
            raise
        except BaseException:
            self._quarantine(begun, self._peers.fence(link))
            raise

    def _quarantine(self, begun: _Round, fence: Awaitable[None]) -> None:
        space = self._space
        for copy, *_ in begun.copies:
            space.catalog.end_copy(copy, False, self._now_ms(), terminal=False)
        space.apply()
        self.quarantined += len(begun.copies)
        space.background(self._await_fence(fence, [c for c, *_ in begun.copies]), "peer fence")

    async def _await_fence(self, fence: Awaitable[None], copies: Sequence[Copy]) -> None:
        await fence
        for copy in copies:
            self._space.catalog.fence_passed(copy, self._now_ms())
        self._space.apply()
        self.quarantined -= len(copies)

    async def _check(self, peer: PeerId, begun: _Round, arrived: Callable[[], None]) -> int:
        """Verifies what has come, in place, and registers it up to the first that is bad."""
        space = self._space
        good = [False] * len(begun.copies)

        def verify() -> None:
            for number, (copy, header, *_) in enumerate(begun.copies):
                assert copy.target_slot is not None, "host memory has slots"
                sums = space.arena.checksums(copy.target_slot.index)
                good[number] = sums == header.checksums

        try:
            await asyncio.to_thread(verify)
        finally:
            bad, came = [], 0
            for sound, (copy, header, *_) in zip(good, begun.copies, strict=True):
                came += space.catalog.end_copy(copy, sound, self._now_ms(), header=header)
                if not sound:
                    bad.append(header.key)
            space.apply()
        if bad:
            self._metrics.corrupt(Tier.PEER, len(bad))
            log.warning("a peer's blocks are not what they should be", peer=peer, blocks=len(bad))
            for key in bad:
                self._peers.book.unhint(peer, block_key(key))
            self._failed(peer, "corrupt: checksums differ")
            self._end_export(peer, begun.export, bad)
        if came:
            arrived()
        return came

    def _failed(self, peer: PeerId, why: str) -> None:
        log.info("a peer is of no use for now", peer=peer, why=why)
        self._peers.book.failed(peer, why, time.monotonic())

    def _end_export(self, peer: PeerId, export: Export, bad: Sequence[bytes] = ()) -> None:
        self._space.background(self._tell_end(peer, export, bad), "export end")

    async def _tell_end(self, peer: PeerId, export: Export, bad: Sequence[bytes]) -> None:
        peers = self._peers
        try:
            address = peers.address(peer)
            await peers.calls.end(address, [export.id], self._space.namespace, bad, END_S)
        except PeerError as exc:
            log.debug("an export ends by itself", peer=peer, why=str(exc))

    async def _discard(self, peer: PeerId, ahead: asyncio.Task[Export | PeerError]) -> None:
        """What was asked for in advance isn't wanted any more."""
        export = await ahead
        if isinstance(export, Export) and export.id:
            await self._tell_end(peer, export, ())
