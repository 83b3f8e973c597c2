"""The connector's client of kvbm, on real gRPC, a real arena and real locks."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from forebay.kvbm.v1 import kvbm_pb2 as pb

from services.common.arena import Geometry
from services.common.ownerlock import OwnerLock
from services.worker.connector.instructions import Ask, Await, Ended, Fill, Instructions
from services.worker.connector.link import Link
from services.worker.connector.model import Slot
from services.worker.connector.news import (
    Attached,
    Committed,
    Found,
    Gone,
    Hello,
    News,
    Promoted,
)
from services.worker.connector.terms import Terms
from tests.fakes.kvbm import FakeKvbm, serve_kvbm
from tests.support.etcd import free_port
from tests.support.polling import until

NAMESPACE = hashlib.sha256(b"link").digest()
HELLO = Hello(NAMESPACE, Geometry(32, 4096, 1, "test"), "w1", "tiny")
KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(20)]


class Side:
    """What the scheduler's and the worker's side do with a link."""

    def __init__(self, port: int, grant_blocks: int = 8) -> None:
        self.link = Link(f"127.0.0.1:{port}", HELLO, grant_blocks=grant_blocks)
        self.news: list[News] = []
        self.lock: OwnerLock | None = None
        self.accept = True

    def hear(self) -> None:
        for news in self.link.take_news():
            self.news.append(news)
            if isinstance(news, Attached):
                if not self.accept:
                    self.link.refuse(news.attachment.owner, "no such file")
                    continue
                lock = OwnerLock(Path(news.attachment.lock_path))
                if self.lock is not None:
                    self.lock.close()
                self.lock = lock
                self.link.ready(news.attachment.owner)

    async def until(self, probe: Callable[[], Any], what: str, within_s: float = 10) -> Any:
        async def look() -> Any:
            self.hear()
            return probe()

        return await until(look, within_s=within_s, what=what)

    def of(self, kind: type[Any]) -> list[Any]:
        return [n for n in self.news if isinstance(n, kind)]

    async def take(self, count: int) -> list[Slot]:
        slots: list[Slot] = []

        def enough() -> bool:
            while len(slots) < count and (slot := self.link.slots.take()) is not None:
                slots.append(slot)
            return len(slots) == count

        await self.until(enough, "slots")
        return slots

    def commit(self, slots: list[Slot], keys: list[bytes], owner: int | None = None) -> None:
        owner = self.link.slots.owner if owner is None else owner
        fills = [
            Fill(owner, slot, key, position=n, checksum=1)
            for n, (slot, key) in enumerate(zip(slots, keys, strict=True))
        ]
        self.link.slots.done(len(slots))
        self.link.send(Instructions(fills=fills))


@asynccontextmanager
async def side(port: int, **more: Any) -> AsyncIterator[Side]:
    made = Side(port, **more)
    made.link.start()
    try:
        yield made
    finally:
        await asyncio.to_thread(made.link.stop)
        if made.lock is not None:
            made.lock.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


async def test_slots_are_granted_ahead_and_committed_in_batches(folder: Path) -> None:
    fake = FakeKvbm(folder)
    async with serve_kvbm(fake) as server, side(server.port) as s:
        slots = await s.take(5)
        assert s.of(Attached)[0].node == "node-fake"
        s.commit(slots[:4], KEYS[:4])
        s.commit(slots[4:], [b""])
        await s.until(lambda: len(fake.blocks) == 4, "commits")
        await s.until(lambda: s.of(Committed), "results")
        assert {k: v for n in s.of(Committed) for k, v in n.results.items()} == dict.fromkeys(
            KEYS[:4], True
        )
        await s.until(lambda: len(s.link.slots) == 8, "new slots")
        (granted,) = fake.granted.values()
        assert len(granted) == 8, "more slots than it may hold"
        assert fake.workers[s.link.slots.owner] == "w1"
    assert not fake.granted, "the farewell gives slots back"


async def test_a_key_that_another_engine_stored_needs_no_save(folder: Path) -> None:
    fake = FakeKvbm(folder)
    async with serve_kvbm(fake) as server, side(server.port) as a, side(server.port) as b:
        for one in (a, b):
            one.commit(await one.take(1), KEYS[:1])
            await one.until(lambda one=one: one.of(Committed), "results")
            assert one.of(Committed)[0].results == {KEYS[0]: True}
        assert len(fake.blocks) == 1
        assert b.link.counts["commit_duplicate"] == 1


async def test_a_daemon_that_comes_late_is_found(folder: Path) -> None:
    """H5: away is no error."""
    port = free_port()
    async with side(port) as s:
        await s.until(lambda: s.link.counts["attach_failures"] >= 2, "tries")
        async with serve_kvbm(FakeKvbm(folder), port):
            await s.take(1)


async def test_after_a_restart_old_slots_are_given_back_once_copies_are_over(folder: Path) -> None:
    """A stopped copy is never overtaken by a new owner of its slot."""
    port = free_port()
    first = FakeKvbm(folder)
    async with side(port) as s:
        async with serve_kvbm(first, port):
            slots = await s.take(2)
            s.commit(slots[:1], KEYS[:1])
            await s.until(lambda: len(first.blocks) == 1, "a commit")
            old = s.link.slots.owner
        second = FakeKvbm(folder)
        async with serve_kvbm(second, port):
            await s.until(lambda: s.of(Gone), "the loss")
            # One copy still runs: nobody attaches, and no slot is given out.
            assert s.link.slots.take() is None
            await asyncio.sleep(0.3)
            assert second.calls["Attach"] == 0
            s.commit(slots[1:], KEYS[1:2], owner=old)
            (new,) = await s.take(1)
            assert second.calls["Attach"] == 1
            assert s.link.slots.owner != old
            assert KEYS[0] in second.blocks, "what was committed is adopted"
            assert old not in second.granted, "the former owner's slots came back"
            await s.until(
                lambda: any(n.results == {KEYS[1]: False} for n in s.of(Committed)),
                "word that the late save is lost",
            )
            s.commit([new], KEYS[1:2])
            await s.until(lambda: KEYS[1] in second.blocks, "the next save")


async def test_a_slow_daemon_holds_nobody_up(folder: Path) -> None:
    """H5: what the scheduler's thread calls returns at once."""
    fake = FakeKvbm(folder)
    async with serve_kvbm(fake) as server, side(server.port) as s:
        slots = await s.take(4)
        fake.delay_s = 0.5
        began = time.perf_counter()
        s.commit(slots, KEYS[:4])
        for n in range(100):
            s.link.send(Instructions(ended=[Ended(n)]))
            s.link.slots.take()
            s.link.take_news()
        assert time.perf_counter() - began < 0.25
        fake.delay_s = 0.0
        await s.until(lambda: len(fake.blocks) == 4, "commits")


async def test_ended_leases_are_told_also_after_an_outage(folder: Path) -> None:
    """L1"""
    port = free_port()
    fake = FakeKvbm(folder)
    fake.leases = {n: ([], 0) for n in (1, 2, 3)}
    async with side(port) as s:
        s.link.send(Instructions(ended=[Ended(1, 4, 0.25, (4,)), Ended(2)]))
        await s.until(lambda: s.link.counts["call_failures"], "a failure")
        async with serve_kvbm(fake, port):
            s.link.send(Instructions(ended=[Ended(3)]))
            await s.until(lambda: not fake.leases, "releases")
    told = next(r for r in fake.reports if r.lease == 1)
    assert (told.loaded_blocks, told.seconds, list(told.bad_blocks)) == (4, 0.25, [4])


async def test_promotions_are_awaited(folder: Path) -> None:
    fake = FakeKvbm(folder)
    async with serve_kvbm(fake) as server, side(server.port) as s:
        s.commit(await s.take(3), KEYS[:3])
        await s.until(lambda: len(fake.blocks) == 3, "commits")
        fake.blocks[KEYS[2]].hidden = True
        lookup = pb.LookupRequest(namespace=NAMESPACE, keys=KEYS[:3])
        found = await fake.Lookup(lookup, None)
        assert (len(found.ready), found.promoting) == (2, 1)
        order = Await("r", found.lease, time.monotonic() + 5)
        s.link.send(Instructions(awaits=[order]))
        await s.until(lambda: fake.calls["Await"], "the question")
        fake.promote()
        (news,) = await s.until(lambda: s.of(Promoted), "the answer")
        assert (news.request, news.lease, len(news.ready), news.promoting) == (
            "r",
            found.lease,
            3,
            0,
        )
        late = Await("r", found.lease, time.monotonic() - 1)
        gone = Await("r", 4711, time.monotonic() + 5)
        s.link.send(Instructions(awaits=[late, gone]))
        await s.until(lambda: len(s.of(Promoted)) == 3, "answers")
        assert [n.ready for n in s.of(Promoted)[1:]] == [None, None]


async def test_a_question_is_answered_or_said_to_be_late(folder: Path) -> None:
    fake = FakeKvbm(folder)
    async with serve_kvbm(fake) as server, side(server.port) as s:
        s.commit(await s.take(4), KEYS[:4])
        await s.until(lambda: len(fake.blocks) == 4, "commits")
        ask = Ask("r", tuple(KEYS[:6]), 1, Terms(tenant="acme"), time.monotonic() + 5)
        s.link.send(Instructions(asks=[ask]))
        (found,) = await s.until(lambda: s.of(Found), "an answer")
        assert found.terms.lease.first == 1
        assert len(found.terms.lease.ready) == 3
        assert (found.terms.stored, found.terms.assumed, found.terms.tenant) == (4, 1, "acme")
        late = Ask("r", tuple(KEYS[:6]), 1, Terms(), time.monotonic() - 1)
        s.link.send(Instructions(asks=[late]))
        await s.until(lambda: len(s.of(Found)) == 2, "word of its end")
        assert s.of(Found)[1].terms is None
        # One that comes late is heard, so that its lease can be given back.
        fake.delay_s = 0.3
        slow = Ask("r", tuple(KEYS[:6]), 1, Terms(), time.monotonic() + 0.1)
        s.link.send(Instructions(asks=[slow]))
        await s.until(lambda: len(s.of(Found)) == 3, "the answer")
        assert s.of(Found)[2].terms.lease is not None


async def test_an_arena_that_can_t_be_used_is_asked_for_again(folder: Path) -> None:
    fake = FakeKvbm(folder)
    async with serve_kvbm(fake) as server:
        made = Side(server.port)
        made.accept = False
        made.link.start()
        try:
            await made.until(lambda: len(made.of(Attached)) >= 2, "another try")
            assert made.link.slots.take() is None
            made.accept = True
            await made.take(1)
        finally:
            await asyncio.to_thread(made.link.stop)
            assert made.lock is not None
            made.lock.close()


async def test_stopping_ends_the_thread(folder: Path) -> None:
    async with side(free_port()) as s:
        pass
    assert not [t for t in threading.enumerate() if t.name == "kvbm-link" and t.is_alive()]
    assert s.link.slots.take() is None
