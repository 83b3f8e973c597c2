"""Peers that die, stop, or start anew: a miss at the worst, and no late write into used memory.

By TCP, where a stopped peer stops its bytes: otherwise, within one machine, UCX reads a stopped
process's memory all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc as pb_grpc

from services.common.events.model import Tier
from services.common.rpc.channel import open_channel
from services.kvbm import fetching
from services.kvbm.core.peers import PeerId, PeerInfo
from services.kvbm.movers.readerlock import held_by_child, wait_for_end
from tests.support.etcd import free_port
from tests.support.kvbm import NAMESPACE, chain, engine
from tests.support.kvbm import daemon_process as process_of
from tests.support.polling import until
from tests.support.processes import Process, Ready

BLOCKS = 40
pytestmark = pytest.mark.chaos


@pytest.fixture(autouse=True)
def by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(fetching, "ASK_S", 2.0)


@pytest.fixture
def reader_rig(rig: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`async with reader_rig() as b`: the daemon that fetches, in this process."""

    @contextlib.asynccontextmanager
    async def run(**more: Any) -> AsyncIterator[Any]:
        values = {"peers": "on", "gate": "always", "promote_ms": 30_000, "peer_timeout_s": 5.0}
        async with rig(folder=tmp_path / "b", id="b", **values, **more) as b:
            yield b

    return run


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Process]:
    """The daemon that is fetched from, a process of its own at a port of its own."""
    flags = ["--port", str(free_port()), "--peers", "on", "--peer-window-mb", "4"]
    flags += ["--cpu-cache-gb", str(16 / 1024), "--scrub-mb-s", "0"]
    process = process_of(tmp_path / "a", *flags, name="a", id="a")
    (tmp_path / "a").mkdir()
    process.start()
    yield process
    process.close()


def meet(b: Any, ready: Ready) -> None:
    info = PeerInfo(PeerId(ready.id), ready.incarnation, ready.address)
    b.daemon.node.peers.record(info)


def helpers_of(pid: int) -> list[int]:
    """Children of a process: its agents."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def window_agent(pid: int) -> int:
    """The agent that shows a daemon's window: the one that has mapped most shared memory."""

    def shared(child: int) -> int:
        maps = Path(f"/proc/{child}/maps").read_text().splitlines()
        return sum("memfd:forebay-staging" in line for line in maps)

    return max(helpers_of(pid), key=shared)


def counts(b: Any) -> Any:
    return b.daemon.node.metrics.counts


async def at_rest(b: Any, within_s: float = 20) -> None:
    async def held() -> list[int]:
        node = b.daemon.node
        found = [len(node.peers.exports.window)]
        for moves in node.moves.values():
            found += [moves.fetches.running, moves.fetches.quarantined]
        for space in node.spaces.values():
            seen = space.catalog.counts()
            found += [seen.leases, seen.copies, seen.tiers[Tier.G2].quarantined]
            space.catalog.check_invariants()
        return found

    await until(held, lambda n: not any(n), within_s=within_s, what="rest")


async def avoided_no_more(b: Any) -> None:
    async def usable() -> bool:
        return bool(b.daemon.node.peers.book.usable(PeerId("a"), time.monotonic()))

    await until(usable, within_s=35, what="another try")


async def warm(b: Any, writer: Any, reader: Any) -> None:
    """Connects: a first prefix is fetched."""
    keys = chain("warm", 4)
    await writer.save(keys)
    assert await reader.load(keys, wait_s=5.0) == 4
    assert counts(b)["peer_blocks_in"] == 4


async def test_a_stopped_peer_is_a_miss_and_never_writes_late(
    reader_rig: Callable[..., Any], source: Process
) -> None:
    """H, R: past the deadline the agent is ended, its slots wait for that, and then are used."""
    ready = await source.until_ready()
    keys, mine = chain("stopped", BLOCKS), chain("mine", 300)
    async with reader_rig() as b, engine(ready.address) as writer, engine(b.address) as reader:
        meet(b, ready)
        await warm(b, writer, reader)
        await writer.save(keys)
        agent = window_agent(source.pid)
        (old,) = b.daemon.node.peers.agent_pids()
        b.daemon.node.peers.timeout_s = 0.5
        os.kill(agent, signal.SIGSTOP)
        try:
            before = time.monotonic()
            assert await reader.load(keys, wait_s=5.0) == 0
            waited_s = time.monotonic() - before
            assert counts(b)["peer_fetches_timeout"] == 1
            await at_rest(b)  # quarantine is over though the peer is stopped still
            assert counts(b)["peer_fences"] >= 1
            assert old not in b.daemon.node.peers.agent_pids()
            with pytest.raises(ProcessLookupError):  # the agent that might write is dead
                os.kill(old, 0)
            await reader.save(mine)  # reuses all slots
        finally:
            os.kill(agent, signal.SIGCONT)
        assert waited_s < 10
        # The peer goes on now, with whatever it still had to send.
        for _ in range(5):
            assert await reader.load(mine, wait_s=5.0, peers=[]) == len(mine)
            await asyncio.sleep(0.2)
        await avoided_no_more(b)
        b.daemon.node.peers.timeout_s = 10.0
        assert await until(
            lambda: reader.load(keys, wait_s=5.0),
            lambda n: n == BLOCKS,
            within_s=40,
            what="blocks of the peer that goes on",
        )
        await at_rest(b)


async def test_slots_wait_until_the_agent_is_dead(
    reader_rig: Callable[..., Any], source: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence is the agent's death, not the deadline: until then nobody gets these slots."""
    ready = await source.until_ready()
    keys = chain("fence", 8)
    async with reader_rig() as b, engine(ready.address) as writer, engine(b.address) as reader:
        meet(b, ready)
        await warm(b, writer, reader)
        await writer.save(keys)
        peers = b.daemon.node.peers
        (link,) = peers._links.values()
        real, dead = link.agent.end, asyncio.Event()

        async def end() -> None:
            await dead.wait()
            await real()

        monkeypatch.setattr(link.agent, "end", end)
        peers.timeout_s = 0.3
        agent = window_agent(source.pid)
        os.kill(agent, signal.SIGSTOP)
        try:
            assert await reader.load(keys, wait_s=5.0) == 0
        finally:
            os.kill(agent, signal.SIGCONT)
        space = b.daemon.node.spaces[NAMESPACE]
        (fetches,) = [m.fetches for m in b.daemon.node.moves.values()]
        assert fetches.quarantined == space.count(Tier.G2).quarantined == 8
        granted = space.catalog.counts().tiers[Tier.G2]
        assert granted.filling == 0
        await reader.save(chain("mine", 400))
        assert fetches.quarantined == space.count(Tier.G2).quarantined == 8
        dead.set()
        await at_rest(b)


async def test_a_peer_that_is_killed_before_or_during_is_a_miss(
    reader_rig: Callable[..., Any], source: Process
) -> None:
    ready = await source.until_ready()
    keys = chain("killed", BLOCKS)
    async with reader_rig() as b, engine(b.address) as reader:
        async with engine(ready.address) as writer:
            meet(b, ready)
            await warm(b, writer, reader)
            await writer.save(keys)
        # In the midst: the agent is stopped, so that the read can't end, and then all of it dies.
        os.kill(window_agent(source.pid), signal.SIGSTOP)
        load = asyncio.create_task(reader.load(keys, wait_s=5.0))

        async def reading() -> int:
            return b.daemon.node.spaces[NAMESPACE].count(Tier.G2).filling

        await until(reading, within_s=20, what="a read")
        source.kill()
        assert await load == 0
        await at_rest(b)
        await avoided_no_more(b)
        assert await reader.load(keys, wait_s=5.0) == 0
        assert counts(b)["peer_blocks_in"] == 4
        await at_rest(b)


async def test_a_peer_restarted_in_place_is_read_from_by_a_new_agent(
    reader_rig: Callable[..., Any], source: Process
) -> None:
    """Before discovery tells of it, too: its agent has another name."""
    ready = await source.until_ready()
    keys, more = chain("restarted", BLOCKS), chain("restarted twice", 8)
    async with reader_rig() as b, engine(b.address) as reader:
        async with engine(ready.address) as writer:
            meet(b, ready)
            await warm(b, writer, reader)
            await writer.save([*keys])
            await writer.save([*more])
        (old,) = b.daemon.node.peers.agent_pids()
        source.kill()
        source.start()
        again = await source.until_ready()
        assert again.incarnation != ready.incarnation and again.address == ready.address
        served = await until(
            lambda: reader.load(keys, wait_s=5.0),
            lambda n: n == BLOCKS,
            within_s=40,
            what="blocks of its arena",
        )
        assert served == BLOCKS
        (new,) = b.daemon.node.peers.agent_pids()
        assert new != old
        meet(b, again)
        assert not b.daemon.node.peers.agent_pids()
        assert await reader.load(more, wait_s=5.0) == 8
        await at_rest(b)


async def test_a_stopped_daemon_is_a_miss_by_the_deadline(
    reader_rig: Callable[..., Any], source: Process
) -> None:
    ready = await source.until_ready()
    keys = chain("frozen", 8)
    async with reader_rig() as b, engine(ready.address) as writer, engine(b.address) as reader:
        meet(b, ready)
        await warm(b, writer, reader)
        await writer.save(keys)
        b.daemon.node.peers.timeout_s = 0.5
        source.freeze()
        try:
            hints = [pb.PeerHint(node="a", first_block=0, blocks=8)]
            before = time.monotonic()
            assert await reader.load(keys, wait_s=5.0, peers=hints) == 0
            assert time.monotonic() - before < 5
        finally:
            source.thaw()
        await at_rest(b)


async def test_an_agent_of_the_window_that_dies_is_started_again(
    reader_rig: Callable[..., Any], source: Process
) -> None:
    ready = await source.until_ready()
    keys = chain("agent", 8)
    async with reader_rig() as b, engine(ready.address) as writer, engine(b.address) as reader:
        meet(b, ready)
        await warm(b, writer, reader)
        await writer.save(keys)
        os.kill(window_agent(source.pid), signal.SIGKILL)
        await until(
            lambda: reader.load(keys, wait_s=5.0),
            lambda n: n == 8,
            within_s=40,
            what="blocks through a new agent",
        )
        await at_rest(b)


async def test_an_agent_that_dies_while_it_reads_costs_a_miss(
    reader_rig: Callable[..., Any], source: Process
) -> None:
    ready = await source.until_ready()
    keys = chain("reader", BLOCKS)
    async with reader_rig() as b, engine(ready.address) as writer, engine(b.address) as reader:
        meet(b, ready)
        await warm(b, writer, reader)
        await writer.save(keys)
        agent = window_agent(source.pid)
        os.kill(agent, signal.SIGSTOP)
        load = asyncio.create_task(reader.load(keys, wait_s=5.0))

        async def reading() -> int:
            return b.daemon.node.spaces[NAMESPACE].count(Tier.G2).filling

        await until(reading, within_s=20, what="a read")
        (pid,) = b.daemon.node.peers.agent_pids()
        os.kill(pid, signal.SIGKILL)
        assert await load == 0
        os.kill(agent, signal.SIGCONT)
        await avoided_no_more(b)
        await until(
            lambda: reader.load(keys, wait_s=5.0),
            lambda n: n == BLOCKS,
            within_s=40,
            what="blocks by another agent",
        )
        await at_rest(b)


async def test_a_reader_that_was_killed_leaves_nothing_at_the_peer(
    rig: Callable[..., Any], tmp_path: Path
) -> None:
    """Its exports expire, its leases ended when the copies were made."""
    flags = ["--peers", "on", "--gate", "always", "--cpu-cache-gb", str(16 / 1024)]
    flags += ["--promote-ms", "30000"]
    (tmp_path / "c").mkdir()
    process = process_of(tmp_path / "c", *flags, name="c", id="c")
    async with rig(id="a", peers="on", peer_window_mb=4) as a, engine(a.address) as writer:
        a.daemon.node.peers.exports._expires_s = 1.0
        keys = chain("left", BLOCKS)
        await writer.save(keys)
        process.start()
        try:
            ready = await process.until_ready()
            async with open_channel(a.address) as channel:
                stub = pb_grpc.KvbmServiceStub(channel)  # type: ignore[no-untyped-call]
                async with engine(ready.address) as reader:
                    geometry = pb.Geometry(
                        block_size_tokens=32, shard_bytes=24_576, ranks=1, layout="test"
                    )
                    request = pb.ExportRequest(
                        namespace=NAMESPACE, geometry=geometry, keys=keys, node="c"
                    )
                    assert (await stub.Export(request, timeout=5)).export
                    assert reader.owner
        finally:
            process.kill()
        await at_rest(a)


async def test_a_daemon_takes_over_no_memory_that_a_former_ones_agent_may_write(
    source: Process, tmp_path: Path
) -> None:
    """Its arenas are adopted when the last of those agents is dead, and not before."""
    await source.until_ready()
    source.kill()
    left = tmp_path / "a" / "arenas" / "ucx_shm_posix_1234"
    left.write_bytes(b"of an agent that was killed while it began")
    lock = held_by_child(tmp_path / "a" / "arenas")
    try:
        source.start()
        with pytest.raises(TimeoutError):
            await source.until_ready(4)
        assert source.alive
    finally:
        os.close(lock)
    await source.until_ready()
    assert not left.exists()


async def test_agents_that_read_hold_the_lock_and_no_others(
    reader_rig: Callable[..., Any], source: Process
) -> None:
    ready = await source.until_ready()
    async with reader_rig() as b, engine(ready.address) as writer, engine(b.address) as reader:
        meet(b, ready)
        await warm(b, writer, reader)
        (pid,) = b.daemon.node.peers.agent_pids()
        folder = b.daemon.node.settings.arena_dir

        def locked_by(pid: int) -> bool:
            files = set()
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # the list's own
                    files.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
            return str(folder / "readers.lock") in files

        assert locked_by(pid)
        assert not locked_by(b.daemon.node.peers.exports.agent_pid)
        assert not locked_by(os.getpid())
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(wait_for_end, folder, 0.1)
    await asyncio.to_thread(wait_for_end, folder, 5)


async def test_random_stops_and_kills_never_serve_a_wrong_byte(
    reader_rig: Callable[..., Any], source: Process
) -> None:
    """Loads go on while the peer's agent is stopped, killed and goes on, at any moment."""
    ready = await source.until_ready()
    rng = random.Random(7)
    async with reader_rig() as b, engine(ready.address) as writer, engine(b.address) as reader:
        meet(b, ready)
        await warm(b, writer, reader)
        b.daemon.node.peers.timeout_s = 0.5
        good = 0
        for number in range(12):
            keys = chain(f"any {number}", 16)
            await writer.save(keys)
            load = asyncio.create_task(reader.load(keys, wait_s=5.0))
            await asyncio.sleep(rng.random() * 0.05)
            with contextlib.suppress(ProcessLookupError, ValueError):
                agent = window_agent(source.pid)
                os.kill(agent, rng.choice([signal.SIGSTOP, signal.SIGKILL]))
                await asyncio.sleep(rng.random() * 0.8)
                os.kill(agent, signal.SIGCONT)
            good += await load
            assert await reader.load(chain("own", 20), wait_s=1.0) in (0, 20)
            await reader.save(chain("own", 20))
        print(f"{good} of {12 * 16} blocks came all the same")
        await at_rest(b)
