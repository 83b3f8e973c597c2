"""Fetches between two nodes in this process: real catalogs, arenas and windows, fake agents."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.common.arena import checksum
from services.common.blocks import block_key
from services.common.events.model import Tier
from services.common.ownerlock import OwnerLock
from services.kvbm.config import KvbmSettings
from services.kvbm.core.peers import PeerBook, PeerId, PeerInfo
from services.kvbm.fetching import Fetches, wanted
from services.kvbm.metrics import KvbmMetrics
from services.kvbm.movers.helper import NixlFailed
from services.kvbm.node import Filled, Node
from services.kvbm.owners import Owners
from services.kvbm.space import Space
from services.kvbm.tiers.exports import Exports
from services.kvbm.tiers.host import HostTier
from services.kvbm.tiers.peer import Peers
from tests.fakes.peers import FakeAgent, FakeCalls, Fault, World
from tests.support.kvbm import NAMESPACE, SMALL, chain, content

A, B = PeerId("a"), PeerId("b")


@dataclass
class Side:
    """One node and an engine that saves."""

    node: Node
    owner: int
    lock: OwnerLock

    @property
    def space(self) -> Space:
        return self.node.spaces[NAMESPACE]

    @property
    def fetches(self) -> Fetches:
        found = self.node.moves[NAMESPACE].fetches
        assert found is not None
        return found

    @property
    def peers(self) -> Peers:
        assert self.node.peers is not None
        return self.node.peers

    def save(self, keys: Sequence[bytes]) -> None:
        parent = b""
        for position, key in enumerate(keys):
            (ref,) = self.node.grant(self.owner, 1)
            data = content(key)
            self.space.arena.shard(ref.index, 0)[:] = data
            block = self.node.block(key, parent, position, "")
            self.node.commit(self.owner, [Filled(ref, block, checksum(data))], 0)
            parent = key

    def good(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are in G2; fails when one has other bytes than it should."""
        count = 0
        for key in keys:
            ref = self.space.catalog.slot(Tier.G2, key)
            if ref is None:
                break
            assert self.space.arena.holds(ref.index, ref.generation, key)
            assert bytes(self.space.arena.shard(ref.index, 0)) == content(key), "wrong bytes"
            count += 1
        return count


@dataclass
class Two:
    a: Side
    b: Side
    world: World
    calls: FakeCalls
    registries: list[CollectorRegistry] = field(default_factory=list)

    async def at_rest(self) -> None:
        """Lets all that goes on end; then nothing may be held."""
        sides = self.a, self.b
        async with asyncio.timeout(20):
            while any(s.space._tasks or s.fetches.running for s in sides):  # noqa: ASYNC110
                await asyncio.sleep(0)
        for side in sides:
            side.space.catalog.check_invariants()
            side.peers.exports.window.check_invariants()
            side.peers.book.check_invariants()
            counts = side.space.catalog.counts()
            assert counts.copies == counts.leases == 0
            assert counts.tiers[Tier.G2].quarantined == side.fetches.quarantined == 0
            side.peers.exports.window.expire(1e12)
            assert side.peers.exports.window.used == 0


@pytest.fixture
def two(tmp_path: Path) -> Callable[..., Any]:
    """`async with two() as t`: nodes a and b that know each other."""

    @contextlib.asynccontextmanager
    async def run(blocks: int = 100, window: int = 1 << 20) -> AsyncIterator[Two]:
        world, nodes = World(), dict[str, Node]()
        calls = FakeCalls(nodes)
        sides: list[Side] = []
        async with contextlib.AsyncExitStack() as stack:
            for id in ("a", "b"):
                folder = tmp_path / id
                settings = KvbmSettings(
                    id=id,
                    cpu_cache_gb=blocks * (SMALL.stride + 256) / 2**30 + 0.0001,
                    cpu_cache_dir=str(folder),
                )
                metrics = KvbmMetrics(CollectorRegistry())
                owners = Owners(folder)
                stack.callback(owners.close)
                host = HostTier(folder, settings.g2_bytes)
                stack.push_async_callback(host.close)
                exports = Exports(
                    window,
                    metrics,
                    Node.now_ms,
                    new_agent=world.agent,  # type: ignore[arg-type]
                )
                peers = Peers(
                    PeerBook(id), calls, exports, metrics, timeout_s=1.0,
                    new_agent=world.agent,  # type: ignore[arg-type]
                )  # fmt: skip
                node = Node(
                    id, 1, settings, host, owners, None, None, lambda events: 0, metrics, peers
                )
                stack.push_async_callback(node.close)
                await peers.start()
                attached, lock, _ = await node.attach(NAMESPACE, SMALL, 0, "w")
                held = OwnerLock(Path(lock))
                stack.callback(held.close)
                nodes[f"{id}:1"] = node
                sides.append(Side(node, attached.owner, held))
            for side, other in (sides, sides[::-1]):
                id = other.node.id
                side.peers.record(PeerInfo(PeerId(id), 1, f"{id}:1"))
            try:
                yield Two(*sides, world, calls)
            finally:
                world.ending.set()

    return run


async def test_a_chain_comes_in_rounds_and_is_what_it_was(two: Callable[..., Any]) -> None:
    keys = chain("rounds", 40)
    async with two() as t:
        t.a.save(keys)
        assert await t.b.fetches.fetch(A, wanted(keys)) == 40 == t.b.good(keys)
        assert t.world.reads >= 4
        assert t.calls.exports <= t.world.reads + 1
        assert set(t.b.space.catalog.run(keys)) == {(Tier.G2,)}, "it lies nowhere else"
        await t.at_rest()


async def test_where_agents_cannot_be_had_there_are_no_peers(
    two: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No NIXL, or none with UCX: said in words, and nothing else is different."""

    async def refused(self: FakeAgent) -> None:
        raise NixlFailed("NIXL is not installed")

    monkeypatch.setattr(FakeAgent, "start", refused)
    keys = chain("alone", 4)
    async with two() as t:
        assert t.b.peers.state == "failed: NIXL is not installed" and not t.b.peers.works
        t.b.peers.book.hint(A, [block_key(key) for key in keys], 0.0)
        assert t.b.fetches.holder(block_key(keys[0])) is None
        assert not t.b.fetches.may_ask(block_key(keys[0]))
        t.b.save(keys)
        assert t.b.good(keys) == 4
        await t.at_rest()


async def test_only_what_is_missing_is_read(two: Callable[..., Any]) -> None:
    keys = chain("some", 9)
    async with two() as t:
        t.a.save(keys)
        t.b.save(keys[:3])
        arrivals: list[int] = []
        fetch = t.b.fetches.fetch(A, wanted(keys), lambda: arrivals.append(t.b.good(keys)))
        assert t.b.fetches.coming(block_key(keys[5])) is not None
        assert await fetch == 6
        assert t.b.fetches.coming(block_key(keys[5])) is None
        assert arrivals == [9]
        await t.at_rest()


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.FAIL, Fault.DIE])
async def test_slots_of_a_failed_read_wait_for_the_agents_end(
    two: Callable[..., Any], fault: Fault
) -> None:
    keys, mine = chain("fault", 8), chain("mine", 90)
    async with two() as t:
        t.a.save(keys)
        t.world.faults = [fault]
        t.world.ending.clear()
        assert await t.b.fetches.fetch(A, wanted(keys)) == 0
        assert t.b.fetches.quarantined == 8, "slots are free that a read may write into"
        assert t.b.space.count(Tier.G2).quarantined == 8
        assert not t.b.peers.book.usable(A, 0.0) or t.b.peers.book.standings(1e12)
        t.b.save(mine)  # memory is full: but not of these slots
        assert t.b.space.count(Tier.G2).quarantined == 8
        t.world.ending.set()
        await t.at_rest()
        assert t.world.late == 1, "the fake did not write late"
        t.b.good(mine)
        t.b.save(chain("more", 40))
        t.b.good(chain("more", 40))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_round_waits_at_the_agent_while_another_is_read(two: Callable[..., Any]) -> None:
    keys = chain("overlap", 90)
    async with two() as t:
        t.a.save(keys)
        t.world.gate = asyncio.Semaphore(0)
        fetch = t.b.fetches.fetch(A, wanted(keys))
        for _ in range(3):
            await until(lambda: t.world.running == 2)
            t.world.gate.release()
            await until(lambda: t.world.running < 2)
        for _ in range(90):
            t.world.gate.release()
        assert await fetch == 90 == t.b.good(keys)
        assert t.world.most_running == 2
        await t.at_rest()


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.FAIL, Fault.DIE])
async def test_the_end_of_an_agent_ends_all_its_reads(
    two: Callable[..., Any], fault: Fault
) -> None:
    """The first round has come; the second fails while the third is under way."""
    keys = chain("beside", 90)
    async with two() as t:
        t.a.save(keys)
        t.world.gate, t.world.faults = asyncio.Semaphore(0), [None, fault]
        t.world.ending.clear()
        fetch = t.b.fetches.fetch(A, wanted(keys))
        await until(lambda: t.world.running == 2)
        t.world.gate.release()
        await until(lambda: t.world.reads == 3)
        t.world.gate.release()
        came = await fetch
        assert 0 < came < 30 and came == t.b.good(keys)
        assert t.b.fetches.quarantined == 2 * came, "of two rounds as large as the first"
        assert t.b.space.count(Tier.G2).quarantined == 2 * came
        t.b.save(chain("mine", 90))  # memory is full: but not of these slots
        t.world.ending.set()
        await t.at_rest()
        assert t.world.late == 2, "the fake did not write late"
        t.b.good(chain("mine", 90))


async def test_the_slots_of_a_fetch_that_is_cancelled_wait_for_the_agents_end(
    two: Callable[..., Any],
) -> None:
    keys = chain("cancelled", 90)
    async with two() as t:
        t.a.save(keys)
        t.world.gate = asyncio.Semaphore(0)
        t.world.ending.clear()
        fetch = t.b.fetches.fetch(A, wanted(keys))
        await until(lambda: t.world.running == 2)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        assert t.b.fetches.quarantined > 0 == t.b.good(keys)
        assert t.b.space.count(Tier.G2).quarantined == t.b.fetches.quarantined
        t.world.ending.set()
        await t.at_rest()
        assert t.world.late == 2, "the fake did not write late"


async def test_a_question_that_fails_does_not_end_what_is_being_read(
    two: Callable[..., Any],
) -> None:
    keys = chain("asked", 90)
    async with two() as t:
        t.a.save(keys)
        t.world.gate, t.calls.refused = asyncio.Semaphore(0), {3}
        fetch = t.b.fetches.fetch(A, wanted(keys))
        await until(lambda: t.world.running == 2)
        t.world.gate.release()
        await until(lambda: t.calls.exports == 3 and t.world.running == 1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not fetch.done() and t.world.running == 1
        t.world.gate.release()
        came = await fetch
        assert came == t.b.good(keys) > 0 == t.b.fetches.quarantined
        assert t.world.reads == 2 and t.b.peers.connected(A)
        assert t.b.node.metrics.counts["peer_fetches_unavailable"] == 1
        await t.at_rest()


async def test_a_read_that_fails_is_noticed_while_the_peer_is_asked(
    two: Callable[..., Any],
) -> None:
    keys = chain("noticed", 90)
    async with two() as t:
        t.a.save(keys)
        t.world.faults, t.calls.held = [Fault.HANG], {2: asyncio.Event()}
        assert await t.b.fetches.fetch(A, wanted(keys)) == 0
        assert t.world.reads == 1
        t.calls.held[2].set()
        await t.at_rest()


async def test_fetches_side_by_side_take_turns_at_the_window(two: Callable[..., Any]) -> None:
    """Two of them want more of it than there is; who reads waits for its own rounds' room."""
    first, second = chain("one", 100), chain("two", 100)
    async with two(blocks=260) as t:
        t.a.save(first)
        t.a.save(second)
        t.world.gate = asyncio.Semaphore(0)
        fetches = [t.b.fetches.fetch(A, wanted(keys)) for keys in (first, second)]
        while not all(fetch.done() for fetch in fetches):
            # Each round takes longer than an export waits for room.
            await asyncio.wait(fetches, timeout=0.25)
            t.world.gate.release()
        assert [await fetch for fetch in fetches] == [100, 100]
        await t.at_rest()


async def test_a_fetch_that_is_cancelled_twice_gives_all_back(two: Callable[..., Any]) -> None:
    keys = chain("twice", 90)
    async with two() as t:
        t.a.save(keys)
        t.world.gate, t.calls.held = asyncio.Semaphore(0), {3: asyncio.Event()}
        fetch = t.b.fetches.fetch(A, wanted(keys))
        await until(lambda: t.world.running == 2 and t.calls.exports == 3)
        link = t.b.peers._links[A]
        fetch.cancel()
        await asyncio.sleep(0)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        t.calls.held[3].set()
        assert link.users == link.reading == 0
        await t.at_rest()
        assert len(t.a.peers.exports.window) == 0


async def test_an_export_that_cannot_be_read_is_given_back(
    two: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(self: FakeAgent, metadata: bytes, timeout_s: float) -> str:
        raise NixlFailed("no way there")

    keys = chain("unread", 8)
    async with two() as t:
        t.a.save(keys)
        monkeypatch.setattr(FakeAgent, "know", refused)
        assert await t.b.fetches.fetch(A, wanted(keys)) == 0
        await until(lambda: not t.b.space._tasks)
        assert len(t.a.peers.exports.window) == 0
        await t.at_rest()


async def test_a_flipped_bit_is_found_and_the_peer_is_told(two: Callable[..., Any]) -> None:
    keys = chain("flip", 8)
    async with two() as t:
        t.a.save(keys)
        t.world.faults = [Fault.FLIP]
        assert await t.b.fetches.fetch(A, wanted(keys)) == 7
        assert t.b.good(keys) == 0 and t.b.good(keys[1:]) == 7
        await t.at_rest()
        assert t.calls.bad == [keys[0]]
        assert t.b.node.metrics.counts["corrupt_blocks_peer"] == 1


async def test_a_peer_that_does_not_answer_or_is_unknown_is_a_miss(two: Callable[..., Any]) -> None:
    keys = chain("away", 8)
    async with two() as t:
        t.a.save(keys)
        t.calls.away.add("a:1")
        assert await t.b.fetches.fetch(A, wanted(keys)) == 0
        assert await t.b.fetches.fetch(PeerId("nobody"), wanted(keys)) == 0
        assert t.b.node.metrics.counts["peer_fetches_unavailable"] == 1
        assert t.b.node.metrics.counts["peer_fetches_unknown"] == 1
        assert await t.b.fetches.ask(keys) is None
        await t.at_rest()


async def test_asking_names_who_has_most_and_remembers_who_has_nothing(
    two: Callable[..., Any],
) -> None:
    keys = chain("ask", 8)
    async with two() as t:
        t.a.save(keys[:5])
        assert await t.b.fetches.ask(keys) == (A, 5)
        assert t.b.fetches.holder(block_key(keys[4])) == A
        assert t.b.fetches.holder(block_key(keys[5])) is None
        assert t.b.fetches.may_ask(block_key(keys[5]))
        assert await t.b.fetches.ask(keys[5:]) is None
        assert not t.b.fetches.may_ask(block_key(keys[5])), "asked again at once"
        chance = t.b.fetches.odds.chance
        assert await t.b.fetches.ask(chain("nothing", 3)) is None
        assert t.b.fetches.odds.chance < chance


async def test_a_hint_that_was_wrong_is_forgotten(two: Callable[..., Any]) -> None:
    keys = chain("wrong", 4)
    async with two() as t:
        t.b.peers.book.hint(A, [block_key(key) for key in keys], 0.0)
        assert await t.b.fetches.fetch(A, wanted(keys)) == 0
        assert t.b.peers.book.holder(block_key(keys[0]), 0.0) is None
        assert t.b.peers.book.usable(A, 0.0), "to have nothing is no failure"


async def test_an_agent_that_was_started_anew_is_read_by_another(two: Callable[..., Any]) -> None:
    keys, more = chain("first", 4), chain("second", 4)
    async with two() as t:
        t.a.save(keys)
        t.a.save(more)
        assert await t.b.fetches.fetch(A, wanted(keys)) == 4
        first = t.b.peers._links[A].agent
        await t.a.peers.exports._agent.close()
        assert await t.b.fetches.fetch(A, wanted(more)) == 0  # agent-away; another is started
        await t.a.peers.exports._restarting
        t.b.peers.book.worked(A)
        assert await t.b.fetches.fetch(A, wanted(more)) == 4
        assert t.b.peers._links[A].agent is not first and not first.alive
        await t.at_rest()


async def test_readers_that_are_served_at_once_share_the_window(two: Callable[..., Any]) -> None:
    chains = [chain(f"reader {n}", 10) for n in range(8)]
    async with two() as t:
        for keys in chains:
            t.a.save(keys)
        work = [t.b.fetches.fetch(A, wanted(keys)) for keys in chains]
        assert await asyncio.gather(*work) == [10] * 8
        await t.at_rest()


async def test_anything_may_fail_and_nothing_wrong_is_ever_registered(
    two: Callable[..., Any],
) -> None:
    """Random faults, late writes, small memory: each block in memory is what its header says."""
    rng = random.Random(11)
    async with two(blocks=40) as t:
        for number in range(120):
            keys = chain(f"any {number}", rng.randrange(1, 30))
            t.a.save(keys[: rng.randrange(1, 30)])
            t.world.faults = [rng.choice([None, None, None, *Fault]) for _ in range(3)]
            (t.world.ending.set if rng.random() < 0.7 else t.world.ending.clear)()
            t.b.peers.book.worked(A)
            t.calls.away = {"a:1"} if rng.random() < 0.1 else set()
            await t.b.fetches.fetch(A, wanted(keys))
            with contextlib.suppress(ValueError):
                t.b.save(chain(f"own {number}", rng.randrange(6)))
            for key in list(t.b.space.catalog.keys(Tier.G2)):
                assert t.b.good([key]) == 1
            t.b.space.catalog.check_invariants()
        t.world.ending.set()
        await t.at_rest()
        assert t.world.late > 5 and t.b.node.metrics.counts["peer_blocks_in"] > 100
