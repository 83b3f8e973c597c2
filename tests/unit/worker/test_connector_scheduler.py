"""The half beside vLLM's scheduler, with objects shaped like vLLM's: pins, orders, counts, cost."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

from services.worker.connector.instructions import Instructions
from services.worker.connector.model import Attachment, LeasedBlock, Loaded, Report, Saved, Slot
from services.worker.connector.news import Attached, Gone, News
from services.worker.connector.plan import Plan
from services.worker.connector.scheduler_side import SchedulerSide
from services.worker.connector.slots import SlotPool
from services.worker.connector.terms import Lease, Terms, to_params

SIZE = 32
GROUP = bytes(4)


def keys(count: int, seed: int = 0) -> list[bytes]:
    return [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(count)]


class FakeLink:
    def __init__(self) -> None:
        self.slots = SlotPool()
        self.slots.open(5)
        self.slots.add(5, [Slot(i, 1) for i in range(1000)])
        self.counts: Counter[str] = Counter()
        self.news: list[News] = []
        self.sent: list[Instructions] = []
        self.told: list[tuple[str, int]] = []

    def send(self, instructions: Instructions) -> None:
        self.sent.append(instructions)

    def take_news(self) -> list[News]:
        news, self.news = self.news, []
        return news

    def ready(self, owner: int) -> None:
        self.told.append(("ready", owner))

    def refuse(self, owner: int, why: str) -> None:
        self.told.append((why, owner))

    @property
    def fills(self) -> list[Any]:
        return [f for i in self.sent for f in i.fills]

    @property
    def ended(self) -> list[Any]:
        return [e for i in self.sent for e in i.ended]


class Pool:
    def __init__(self, count: int) -> None:
        self.blocks = [
            SimpleNamespace(block_id=i, block_hash=None, ref_cnt=0) for i in range(count)
        ]

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    @property
    def held(self) -> int:
        return sum(b.ref_cnt for b in self.blocks)


class Stats:
    num_prompt_tokens = 11 * SIZE
    num_local_cached_tokens = 0
    num_external_cached_tokens = 0

    def set(self, prompt: int, local: int, external: int) -> None:
        self.num_prompt_tokens, self.num_local_cached_tokens = prompt, local
        self.num_external_cached_tokens = external


class Rig:
    def __init__(self, blocks: int = 4096) -> None:
        self.link = FakeLink()
        self.plan = Plan(self.link.slots, pin_limit=64)
        self.side = SchedulerSide(SIZE, self.plan, self.link)  # type: ignore[arg-type]
        self.pool = Pool(blocks)
        self.tables: dict[str, list[Any]] = {}
        self.side.bind(
            SimpleNamespace(
                block_pool=self.pool,
                get_blocks=lambda id: SimpleNamespace(blocks=(self.tables[id],)),
            )
        )
        self.next = 1

    def request(self, id: str, blocks: int, terms: Terms | None, *, seed: int = 0) -> Any:
        chain = keys(blocks, seed)
        request = SimpleNamespace(
            request_id=id,
            block_hashes=chain,
            kv_transfer_params=None if terms is None else to_params(terms),
            num_computed_tokens=0,
            num_tokens=blocks * SIZE + 5,
            num_preemptions=0,
            skip_reading_prefix_cache=False,
            prefill_stats=Stats(),
        )
        table = self.pool.blocks[self.next : self.next + blocks]
        self.next += blocks
        for block, key in zip(table, chain, strict=True):
            block.block_hash = key + GROUP
        self.tables[id] = table
        self.side.arrive(request)
        return request

    def orders(self, scheduled: dict[str, int], preempted: tuple[str, ...] = ()) -> Any:
        return self.side.orders(
            SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=preempted)
        )


def test_blocks_of_a_save_are_kept_until_their_copies_are_over() -> None:
    """K3, and none of them is kept at rest."""
    rig = Rig()
    request = rig.request("r", 4, Terms())
    (save,) = rig.orders({"r": 3 * SIZE + 1}).saves
    assert save.blocks == (1, 2, 3)
    assert rig.pool.held == 3
    assert rig.side.busy
    rig.side.leave(request)
    assert rig.pool.held == 3, "a request's end does not end its saves"
    rig.side.report(Report(saved={save.job: Saved((7, 8, None), 0.1)}))
    assert rig.pool.held == 0
    assert not rig.side.busy
    assert [(f.key, f.checksum) for f in rig.link.fills] == [
        (keys(4)[0], 7),
        (keys(4)[1], 8),
        (b"", 0),
    ]
    assert rig.link.slots.copying == 0


def test_a_block_under_another_hash_is_never_saved() -> None:
    rig = Rig()
    rig.request("r", 4, Terms())
    rig.tables["r"][1].block_hash = keys(4, seed=9)[1] + GROUP
    (save,) = rig.orders({"r": 4 * SIZE}).saves
    assert save.blocks == (1,)
    rig.tables["r"][1].block_hash = None
    assert rig.orders({"r": 1}).saves == ()


def test_a_request_of_nobody_is_left_alone() -> None:
    """Warm-up requests leave nothing in the tiers."""
    rig = Rig()
    request = rig.request("r", 4, None)
    assert rig.side.match(request, 0) == 0
    assert rig.orders({"r": 4 * SIZE}).saves == ()
    rig.side.leave(request)


def load(rig: Rig, request: Any) -> Any:
    blocks = [b.block_id for b in rig.tables["r"]]
    rig.side.allocated(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), 6 * SIZE)
    (order,) = rig.orders({}).loads
    return order


def leased() -> Terms:
    ready = tuple(LeasedBlock(Slot(i, 3), (i,)) for i in range(6))
    now_s = time.monotonic()
    return Terms(stored=6, lease=Lease(77, 0, ready, 0, now_s + 2, now_s + 60))


def test_tokens_of_a_failed_load_do_not_count_as_cached() -> None:
    """True counts: vLLM's own hold the whole load."""
    rig = Rig()
    request = rig.request("r", 8, leased())
    assert rig.side.match(request, 0) == 6 * SIZE
    request.prefill_stats.set(8 * SIZE + 5, 0, 6 * SIZE)
    order = load(rig, request)
    assert [i.slot.index for i in order.items] == list(range(6))
    rig.side.report(Report(loaded={"r": Loaded(4, (4,), 0.1)}))
    assert request.prefill_stats.num_external_cached_tokens == 4 * SIZE
    assert [(e.lease, e.loaded, e.bad) for e in rig.link.ended] == [(77, 4, (4,))]
    request.num_computed_tokens = 4 * SIZE
    (save,) = rig.orders({"r": 4 * SIZE}).saves
    assert save.blocks == (5, 6, 7, 8), "computed anew, so saved anew"


def test_an_aborted_load_is_heard_of() -> None:
    """L5"""
    rig = Rig()
    request = rig.request("r", 8, leased())
    rig.side.match(request, 0)
    load(rig, request)
    rig.side.leave(request)
    assert not rig.link.ended
    rig.side.report(Report(loaded={"r": Loaded(6)}))
    assert [(e.lease, e.loaded) for e in rig.link.ended] == [(77, 6)]
    assert rig.plan.requests == 0


def test_a_decode_leg_and_prompt_logprobs_load_nothing() -> None:
    rig = Rig()
    request = rig.request("r", 8, leased())
    request.skip_reading_prefix_cache = True
    assert rig.side.match(request, 0) == 0
    request.skip_reading_prefix_cache = False
    request.kv_transfer_params["do_remote_prefill"] = True
    assert rig.side.match(request, 0) == 0


def test_an_attachment_is_handed_on_and_answered() -> None:
    rig = Rig()
    attachment = Attachment(6, "/lock", "/arena")
    rig.link.news.append(Attached(attachment, "node-1"))
    assert rig.side.busy
    assert rig.orders({}).attach == attachment
    assert rig.side.busy, "the arena is not mapped yet"
    assert rig.side.figures()["node"] == "node-1"
    rig.side.report(Report(attached={6: ""}))
    assert rig.link.told == [("ready", 6)]
    assert not rig.side.busy
    rig.link.news.append(Gone())
    assert not rig.side.busy
    assert rig.side.figures()["node"] == ""
    rig.link.news.append(Attached(Attachment(7, "/lock", "/arena"), "node-1"))
    rig.orders({})
    rig.side.report(Report(attached={7: "no such file"}))
    assert rig.link.told[-1] == ("no such file", 7)


def test_a_step_costs_the_scheduler_little() -> None:
    """H5: at most 100 us a step for 32 running requests, when there is nothing to copy."""
    rig = Rig(40_000)
    for n in range(32):
        request = rig.request(f"r{n}", 1000, Terms(stored=999), seed=n)
        request.num_computed_tokens = 999 * SIZE
    scheduled = {f"r{n}": 1 for n in range(32)}

    def one() -> float:
        began = time.perf_counter()
        assert not rig.side.busy
        rig.orders(scheduled)
        rig.side.figures()
        return time.perf_counter() - began

    assert min(one() for _ in range(30)) < 100e-6
