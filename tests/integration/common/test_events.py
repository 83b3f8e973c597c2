"""Event streams over real ZMQ sockets."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import zmq

from services.common.errors import Unavailable
from services.common.events import publisher as publisher_module
from services.common.events.model import Batch, BlocksStored, Event, Snapshot, Tier
from services.common.events.publisher import EventPublisher, open_publisher
from services.common.events.subscriber import Apply, FollowStats, Heard, Reset, follow
from services.common.ids import BlockKey


def stored(*keys: int) -> list[Event]:
    return [BlocksStored(Tier.G1, tuple(BlockKey(k) for k in keys))]


@dataclass
class Follower:
    """A consumer in its own task; keeps what it saw."""

    address: str
    take_snapshot: Callable[[], Awaitable[Snapshot]]
    publisher: str = "w1"
    stats: FollowStats = field(default_factory=FollowStats)
    items: list[Reset | Apply | Heard] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.open.set()

    async def run(self) -> None:
        stream = follow(self.address, self.publisher, self.take_snapshot, stats=self.stats)
        async with contextlib.aclosing(stream):
            async for item in stream:
                self.items.append(item)
                self.news.set()
                await self.open.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.news.clear()
                await self.news.wait()

    @property
    def batches(self) -> list[Batch]:
        return [i.batch for i in self.items if isinstance(i, Apply) and i.batch.events]

    @property
    def resets(self) -> list[Snapshot]:
        return [i.snapshot for i in self.items if isinstance(i, Reset)]


@contextlib.asynccontextmanager
async def following(follower: Follower) -> AsyncIterator[Follower]:
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def snapshots_of(publisher: EventPublisher, incarnation: int) -> Callable[[], Awaitable[Snapshot]]:
    async def take() -> Snapshot:
        return Snapshot("w1", incarnation, publisher.sequence)

    return take


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_batches_arrive_in_order_after_a_reset(host: str) -> None:
    async with open_publisher(host, 0, "w1", 7, heartbeat_s=0.05) as pub:
        assert pub.address.startswith("tcp://")
        async with following(Follower(pub.address, snapshots_of(pub, 7))) as sub:
            await sub.until(lambda: bool(sub.resets))
            for n in range(1, 501):
                assert pub.publish(stored(n)) == n
            await sub.until(lambda: len(sub.batches) == 500)
            assert [b.sequence for b in sub.batches] == list(range(1, 501))
            assert sub.batches[0].events == tuple(stored(1))
            assert sub.batches[0].publisher == "w1" and sub.batches[0].incarnation == 7
            # A heartbeat follows and takes no number.
            await sub.until(
                lambda: isinstance(sub.items[-1], Apply) and sub.items[-1].batch.is_heartbeat
            )
            assert sub.items[-1].batch.sequence == 500  # type: ignore[union-attr]
    assert sub.stats == FollowStats(snapshots=1)


async def test_nothing_published_takes_no_number() -> None:
    async with open_publisher("127.0.0.1", 0, "w1", 7) as pub:
        assert pub.publish([]) == 0
        assert pub.publish(stored(1)) == 1
        assert pub.publish([]) == 1


async def test_a_late_joiner_gets_the_state_and_what_follows() -> None:
    async with open_publisher("127.0.0.1", 0, "w1", 7, heartbeat_s=0.05) as pub:
        for n in range(10):
            pub.publish(stored(n))
        async with following(Follower(pub.address, snapshots_of(pub, 7))) as sub:
            await sub.until(lambda: bool(sub.resets))
            pub.publish(stored(99))
            await sub.until(lambda: bool(sub.batches))
    assert sub.resets[0].sequence == 10
    assert [b.sequence for b in sub.batches] == [11]


async def test_batches_during_a_slow_snapshot_are_kept() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async with open_publisher("127.0.0.1", 0, "w1", 7, heartbeat_s=0.05) as pub:

        async def slow() -> Snapshot:
            sequence = pub.sequence
            asked.set()
            await answer.wait()
            return Snapshot("w1", 7, sequence)

        async with following(Follower(pub.address, slow)) as sub:
            async with asyncio.timeout(5):
                await asked.wait()
            for n in range(5):
                pub.publish(stored(n))
            await sub.until(lambda: Heard(7, 5) in sub.items)
            assert not sub.resets
            answer.set()
            await sub.until(lambda: len(sub.batches) == 5)
    assert sub.stats == FollowStats(snapshots=1)


async def test_failing_snapshots_are_tried_again() -> None:
    async with open_publisher("127.0.0.1", 0, "w1", 7, heartbeat_s=0.05) as pub:
        failures: list[BaseException] = [
            Unavailable("not yet"),
            ValueError("a fault of the caller's"),
            TimeoutError(),
            asyncio.CancelledError(),
        ]

        async def flaky() -> Snapshot:
            if failures:
                raise failures.pop()
            return Snapshot("w1", 7, pub.sequence)

        async with following(Follower(pub.address, flaky)) as sub:
            await sub.until(lambda: bool(sub.resets))
    assert sub.stats.failed_snapshots == 4


async def test_lost_batches_are_noticed_and_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        open_publisher("127.0.0.1", 0, "w1", 7, heartbeat_s=0.05) as pub,
        following(Follower(pub.address, snapshots_of(pub, 7))) as sub,
    ):
        await sub.until(lambda: bool(sub.resets))
        pub.publish(stored(1))
        with monkeypatch.context() as lossy:
            lossy.setattr(pub, "_send", lambda events: None)
            pub.publish(stored(2))
        pub.publish(stored(3))
        await sub.until(lambda: len(sub.resets) == 2)
        assert sub.stats.gaps == 1
        # The very last one is lost: only the heartbeat can tell.
        with monkeypatch.context() as lossy:
            lossy.setattr(pub, "_send", lambda events: None)
            pub.publish(stored(4))
        await sub.until(lambda: len(sub.resets) == 3)
        pub.publish(stored(5))
        await sub.until(lambda: sub.batches[-1].sequence == 5)
    assert sub.stats.gaps == 2


async def test_a_restarted_publisher_is_a_new_epoch(unused_tcp_port: int) -> None:
    current: list[Callable[[], Awaitable[Snapshot]]] = []

    async def take() -> Snapshot:
        return await current[-1]()

    follower = Follower(f"tcp://127.0.0.1:{unused_tcp_port}", take)
    async with following(follower) as sub:
        for life in (1, 2):
            async with open_publisher(
                "127.0.0.1", unused_tcp_port, "w1", life, heartbeat_s=0.05
            ) as pub:
                current.append(snapshots_of(pub, life))
                await sub.until(lambda life=life: life in [r.incarnation for r in sub.resets])
                pub.publish(stored(life))
                await sub.until(lambda life=life: len(sub.batches) == life)
    assert [b.incarnation for b in sub.batches] == [1, 2]
    assert sub.stats.epochs == 1


async def test_a_snapshot_of_another_life_is_not_taken() -> None:
    answers = [3, 3, 7]

    async with open_publisher("127.0.0.1", 0, "w1", 7, heartbeat_s=0.05) as pub:

        async def take() -> Snapshot:
            return Snapshot("w1", answers.pop(0), pub.sequence)

        async with following(Follower(pub.address, take)) as sub:
            await sub.until(lambda: bool(sub.resets))
    assert [r.incarnation for r in sub.resets] == [7]
    assert sub.stats.refused_snapshots == 2


async def test_a_consumer_that_stands_still_blocks_nobody_and_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "SEND_LIMIT", 50)
    monkeypatch.setattr("services.common.events.subscriber.RECEIVE_LIMIT", 50)
    async with (
        open_publisher("127.0.0.1", 0, "w1", 7, heartbeat_s=0.05) as pub,
        following(Follower(pub.address, snapshots_of(pub, 7))) as sub,
    ):
        await sub.until(lambda: bool(sub.resets))
        sub.open.clear()
        # Far more than both queues and the sockets' own buffers hold.
        for start in range(2_000):
            pub.publish(stored(*range(start, start + 2_000)))
        sub.open.set()
        await sub.until(lambda: len(sub.resets) >= 2)
        pub.publish(stored(1))
        await sub.until(lambda: bool(sub.batches) and sub.batches[-1].sequence == 2_001)
    assert sub.stats.gaps >= 1


async def test_other_publishers_and_rubbish_are_skipped() -> None:
    async with (
        open_publisher("127.0.0.1", 0, "w1", 7, heartbeat_s=0.05) as pub,
        following(Follower(pub.address, snapshots_of(pub, 7))) as sub,
    ):
        await sub.until(lambda: bool(sub.resets))
        raw: zmq.Socket[bytes] = pub._socket
        raw.send_multipart((b"w1", b"\xff\xff"))
        raw.send_multipart((b"w10", b"\xff\xff"))
        raw.send_multipart((b"w1",))
        other = EventPublisher(raw, "", "w2", 1)
        other._topic = b"w1"
        other.publish(stored(1))
        pub.publish(stored(5))
        await sub.until(lambda: bool(sub.batches))
    assert [b.publisher for b in sub.batches] == ["w1"]
    assert sub.stats.unreadable == 3
    assert sub.stats.epochs == 0


async def test_a_taken_port_is_named() -> None:
    async with open_publisher("127.0.0.1", 0, "w1", 7) as pub:
        port = int(pub.address.rpartition(":")[2])
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}") as caught:
            async with open_publisher("127.0.0.1", port, "w2", 7):
                pass
    assert caught.value.reason == "PORT_TAKEN"


async def test_an_advertised_host_is_told() -> None:
    async with open_publisher("0.0.0.0", 0, "w1", 7, advertise_host="w1.example") as pub:
        assert pub.address.startswith("tcp://w1.example:")


def test_a_process_may_follow_more_streams_than_zmq_allows_by_itself() -> None:
    program = (
        "import resource, zmq; from services.common.events.subscriber import allow_streams;"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE);"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard));"
        "allow_streams(3000);"
        "made = [zmq.Context.instance().socket(zmq.SUB) for _ in range(1100)]; print(len(made))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50
    )
    assert ran.stdout.strip() == "1100", ran.stderr
