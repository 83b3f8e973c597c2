"""A prompt on one worker, its decode on another: what goes wrong costs time, never the answer."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.common.cards import Adapter
from services.common.errors import (
    FailedPrecondition,
    ForebayError,
    Internal,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from services.gateway.core.sampling import Sampling
from services.gateway.errors import ApiError, BadRequest, UpstreamFailed
from services.gateway.metrics import GatewayMetrics
from services.gateway.pipeline import Generation, Pipeline
from services.gateway.ports import Ask, Ended, Placement, Wishes, Work, WorkerLost
from services.gateway.prepare import Caller, Job, Prompt
from tests.fakes.pool import FakePlacer, FakePool, placement

PROMPT = list(range(40, 110))
LOST = WorkerLost("gone")


class Letters:
    """Token i is the character i."""

    byte_exact = True
    strips_first_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def is_special(self, token_id: int) -> bool:
        return False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))


@dataclass
class Rig:
    """A job that runs, and what it runs on."""

    pool: FakePool
    placer: FakePlacer
    task: asyncio.Task[None]
    registry: CollectorRegistry
    generation: Generation | None = None
    text: dict[int, str] = field(default_factory=dict)
    said: dict[str, int] = field(default_factory=dict)
    """Letters of each decode leg so far, prior ones included."""

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"forebay_gateway_{name}", labels) or 0.0

    @property
    def usage(self) -> Any:
        assert self.generation is not None
        return self.generation.usage

    def assert_nothing_left(self) -> None:
        """Nothing runs, is counted as running, or is held by a prefill worker for nobody."""
        assert self.count("sequences_in_flight") == 0
        assert not self.pool.running


def job(*, sampling: Sampling | None = None, n: int = 1, prompts: int = 1, **changes: Any) -> Job:
    sampling = sampling or Sampling(max_tokens=4)
    served: Any = SimpleNamespace(
        name="m",
        card=SimpleNamespace(block_size=32),
        tokenizer=Letters(),
        adapter=None,
        refused=frozenset(),
    )
    now = asyncio.get_running_loop().time()
    fields: dict[str, Any] = {
        "served": served,
        "prompts": (Prompt(PROMPT, (), sampling),) * prompts,
        "n": n,
        "salt": "s",
        "caller": Caller("req", now + 60, tenant="t", trace={"traceparent": "tp"}),
        "priority": 3,
    }
    return Job(**{**fields, **changes})


@asynccontextmanager
async def running(a_job: Job, placer: FakePlacer, **options: Any) -> AsyncIterator[Rig]:
    registry = CollectorRegistry()
    pool = FakePool()
    for name, value in options.items():
        setattr(pool, name, value)
    pipeline = Pipeline(placer, pool, GatewayMetrics(registry), gateway_id="g", max_migrations=3)

    async def consume() -> None:
        async with pipeline.run(a_job) as generation:
            rig.generation = generation
            while not generation.finished:
                for update in await generation.updates():
                    if update.anew:
                        rig.text[update.index] = ""
                    text = rig.text.get(update.index, "") + update.delta.text
                    rig.text[update.index] = text

    rig = Rig(pool, placer, asyncio.create_task(consume()), registry)
    try:
        yield rig
    finally:
        rig.task.cancel()
        await asyncio.gather(rig.task, return_exceptions=True)


def abcd(rig: Rig, work: Work, *, cached: int = 0, transferred: int = 0) -> None:
    """A decode leg's whole answer."""
    letters = [ord(c) for c in "abcd"][len(work.prior) :]
    rig.pool.say(work, *letters, cached=cached, transferred=transferred, ended=Ended.LENGTH)


async def test_two_legs() -> None:
    """The prompt goes to one, and the sequence with the handle to the other."""
    sampling = Sampling(
        max_tokens=4, min_tokens=2, seed=5, stop_token_ids=(9,), logprobs=3, presence_penalty=1.0
    )
    placer = FakePlacer(placement("d", "p", cached=32, first=64))
    async with running(job(sampling=sampling), placer) as r:
        where, leg = await r.pool.next(1)
        assert where == "p" and leg.prefill_only and leg.transfer is None
        assert list(leg.prompt) == PROMPT and not leg.prior
        assert leg.sampling == Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        assert leg.attempt_id == placer.answers[0].prefill.attempt_id
        assert r.count("sequences_in_flight") == 1
        r.pool.prefilled(leg, cached=64)
        where, work = await r.pool.next(2)
        assert where == "d" and not work.prefill_only
        assert work.sampling == sampling and work.attempt_id == placer.answers[0].attempt_id
        assert work.transfer is not None and work.transfer.name == f"kv-{leg.request_id}"
        assert work.transfer.tokens == len(PROMPT)
        for name in ("model", "tenant", "cache_salt", "adapter", "priority", "trace"):
            assert getattr(leg, name) == getattr(work, name)
        assert (work.tenant, work.cache_salt, work.trace) == ("t", "s", {"traceparent": "tp"})
        abcd(r, work, cached=69, transferred=69)
        await r.task
        assert r.text == {0: "abcd"}
        assert r.usage.cached_tokens == 64 and r.usage.completion_tokens == 4
        assert r.generation.predicted_cached_tokens == 64
        assert r.generation.prefilled_by == ["p"]
        assert [p.worker.id for p in r.generation.placements] == ["d"]
        assert not placer.released and not r.pool.let_go
        assert len(placer.asks) == 1 and not placer.asks[0].whole
        assert r.count("prefill_legs_total", result="done") == 1
        assert r.count("transfers_total", result="used") == 1
        assert r.count("transferred_tokens_total", model="m") == 69
        assert r.count("handover_seconds_count", model="m") == 1
        assert r.count("prefill_leg_seconds_count", model="m") == 1
        r.assert_nothing_left()


async def test_end_in_pieces() -> None:
    """The token and the end of a prefill leg need not come together."""
    async with running(job(), FakePlacer(placement("d", "p"))) as r:
        _, leg = await r.pool.next(1)
        r.pool.say(leg, 7, cached=32)
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(r.pool.started) == 1 and not r.text
        r.pool.say(leg, ended=Ended.LENGTH, handle=True)
        _, work = await r.pool.next(2)
        abcd(r, work, cached=69, transferred=37)
        await r.task
        assert r.usage.cached_tokens == 32


@pytest.mark.parametrize(
    ("cached", "transferred", "told", "predicted", "result"),
    [
        (69, 69, 64, 40, "used"),
        (32, 32, 32, 40, "used"),  # the transfer failed in part: the rest was computed again
        (10, 0, 10, 20, "unused"),
    ],
)
async def test_what_was_cached(
    cached: int, transferred: int, told: int, predicted: int, result: str
) -> None:
    """Told is what neither leg computed; without the transfer the decode leg is all there was."""
    async with running(job(), FakePlacer(placement("d", "p", cached=20, first=40))) as r:
        leg = (await r.pool.next(1))[1]
        r.pool.prefilled(leg, cached=64)
        abcd(r, (await r.pool.next(2))[1], cached=cached, transferred=transferred)
        await r.task
        # Who computed all of it takes nothing any more: the other need not hold it.
        assert r.pool.let_go == ([] if transferred else [f"kv-{leg.request_id}"])
        assert r.usage.cached_tokens == told
        assert r.generation.predicted_cached_tokens == predicted
        assert r.generation.prefilled_by == (["p"] if transferred else [])
        assert r.count("transfers_total", result=result) == 1


@pytest.mark.parametrize("refused", [True, False])
async def test_prefill_worker_out_of_reach(refused: bool) -> None:
    placer = FakePlacer(placement("d", "p", cached=5, first=50))
    lost = {"p": WorkerLost("no", refused=refused)}
    async with running(job(), placer, unreachable=lost) as r:
        where, work = await r.pool.next(1)
        assert where == "d" and work.transfer is None and not work.prefill_only
        assert placer.released == [(placer.answers[0].prefill, refused)]
        abcd(r, work, cached=3)
        await r.task
        assert r.text == {0: "abcd"} and r.usage.cached_tokens == 3
        assert r.generation.predicted_cached_tokens == 5
        assert r.count("prefill_legs_total", result="unreachable") == 1
        assert len(placer.asks) == 1
        r.assert_nothing_left()


FAILURES: list[tuple[str, dict[str, Any]]] = [
    ("lost", {"error": LOST}),
    ("aborted", {"ended": Ended.ABORT}),
    ("aborted", {"ended": Ended.ABORT, "handle": True}),
    ("refused", {"ended": Ended.ERROR, "error": Unavailable("", reason="DRAINING")}),
    ("refused", {"ended": Ended.ERROR, "error": Overloaded("", reason="OVERLOADED")}),
    ("refused", {"ended": Ended.ERROR, "error": FailedPrecondition("", reason="UNSUPPORTED")}),
    ("refused", {"ended": Ended.ERROR, "error": InvalidRequest("", field="prefill_only")}),
    ("failed", {"ended": Ended.ERROR, "error": Internal("", reason="ENGINE_ERROR")}),
    ("failed", {"ended": Ended.ERROR, "error": Unavailable("", reason="ENGINE_DEAD")}),
    ("no_handle", {"ended": Ended.LENGTH}),
]


@pytest.mark.parametrize(("result", "end"), FAILURES)
@pytest.mark.parametrize("midway", [True, False])
async def test_a_failed_prefill_is_a_recompute(
    result: str, end: dict[str, Any], midway: bool
) -> None:
    placer = FakePlacer(placement("d", "p"))
    async with running(job(), placer) as r:
        _, leg = await r.pool.next(1)
        if midway:
            r.pool.say(leg, 7, cached=64)
            await asyncio.sleep(0)
        r.pool.say(leg, **end)
        where, work = await r.pool.next(2)
        assert where == "d" and work.transfer is None and not work.prefill_only
        assert work.attempt_id == placer.answers[0].attempt_id
        abcd(r, work, cached=3)
        await r.task
        assert r.text == {0: "abcd"} and r.usage.cached_tokens == 3
        assert r.count("prefill_legs_total", result=result) == 1
        assert placer.released == [(placer.answers[0].prefill, False)]
        assert len(placer.asks) == 1
        assert len(r.pool.let_go) == int(bool(end.get("handle")))
        assert not any(r.count("transfers_total", result=x) for x in ("used", "unused"))
        r.assert_nothing_left()


@pytest.mark.parametrize("reached", [True, False])
async def test_who_failed_is_avoided_next(reached: bool) -> None:
    placer = FakePlacer(placement("d", "p"), placement("e"))
    lost = {} if reached else {"p": LOST}
    async with running(job(), placer, unreachable=lost) as r:
        if reached:
            r.pool.say((await r.pool.next(1))[1], error=LOST)
        await r.pool.until(lambda: any(worker == "d" for worker, _ in r.pool.started))
        r.pool.say(r.pool.started[-1][1], error=LOST)
        await r.pool.until(lambda: len(placer.asks) == 2)
        assert placer.asks[1].excluded == {"p", "d"} and not placer.asks[1].whole


async def test_the_clients_mistake() -> None:
    placer = FakePlacer(placement("d", "p"))
    async with running(job(), placer) as r:
        _, leg = await r.pool.next(1)
        wrong = InvalidRequest("too long", field="prompt_token_ids")
        r.pool.say(leg, ended=Ended.ERROR, error=wrong)
        with pytest.raises(BadRequest) as told:
            await r.task
        assert told.value.param == "prompt"
        assert [worker for worker, _ in r.pool.started] == ["p"]
        assert placer.released == [(placer.answers[0], False)]
        assert r.count("prefill_legs_total", result="invalid") == 1
        r.assert_nothing_left()


@pytest.mark.parametrize("refused", [True, False])
async def test_decode_worker_out_of_reach(refused: bool) -> None:
    """The KV is let go of, and what is placed anew may have a prefill leg again, which hits."""
    one, two = placement("d", "p"), placement("e", "p")
    placer = FakePlacer(one, two)
    lost = {"d": WorkerLost("no", refused=refused)}
    async with running(job(), placer, unreachable=lost) as r:
        _, leg = await r.pool.next(1)
        r.pool.prefilled(leg)
        where, again = await r.pool.next(2)
        assert where == "p" and again.prefill_only
        assert r.pool.let_go == [f"kv-{leg.request_id}"]
        assert placer.released == [(one, refused)]
        assert placer.asks[1].excluded == {"d"} and not placer.asks[1].whole
        assert placer.asks[1].admitted
        r.pool.prefilled(again, cached=64)
        where, work = await r.pool.next(3)
        assert where == "e" and work.transfer is not None
        assert work.transfer.name == f"kv-{again.request_id}"
        abcd(r, work, cached=69, transferred=69)
        await r.task
        assert r.text == {0: "abcd"} and r.usage.cached_tokens == 64
        assert r.count("prefill_legs_total", result="done") == 2
        r.assert_nothing_left()


async def test_at_most_one_more_prefill() -> None:
    placer = FakePlacer(placement("d", "p"), placement("e", "p"), placement("f", "p"))
    lost = {"d": LOST, "e": LOST}
    async with running(job(), placer, unreachable=lost) as r:
        r.pool.prefilled((await r.pool.next(1))[1])
        r.pool.prefilled((await r.pool.next(2))[1])
        where, work = await r.pool.next(3)
        assert where == "f" and work.transfer is None
        assert [ask.whole for ask in placer.asks] == [False, False, True]
        # The router of this test does not know the wish: its prefill booking is given back.
        assert (placer.answers[0].prefill, False) in placer.released
        abcd(r, work)
        await r.task
        assert len(r.pool.let_go) == 2
        r.assert_nothing_left()


@pytest.mark.parametrize("written", [True, False], ids=["told", "queued"])
async def test_decode_worker_lost_with_the_handle(written: bool) -> None:
    """One that was told of the KV answers for it; from one that was not, it is taken back."""
    placer = FakePlacer(placement("d", "p"), placement("e"))
    async with running(job(), placer, writing=written) as r:
        _, leg = await r.pool.next(1)
        r.pool.prefilled(leg, cached=64)
        _, work = await r.pool.next(2)
        r.pool.say(work, error=LOST)
        where, work = await r.pool.next(3)
        assert where == "e" and work.transfer is None and not work.prior
        assert r.pool.let_go == ([] if written else [f"kv-{leg.request_id}"])
        abcd(r, work, cached=3)
        await r.task
        assert r.text == {0: "abcd"} and r.usage.cached_tokens == 3
        assert r.generation.prefilled_by == []
        assert r.count("transfers_total", result="failed") == 1
        assert r.count("migrations_total", result="resumed") == 1
        assert placer.asks[1].excluded == {"d"}
        r.assert_nothing_left()


async def test_decode_worker_lost_midway() -> None:
    """The next prefill leg computes the prompt with the output so far."""
    placer = FakePlacer(placement("d", "p"), placement("e", "p"))
    async with running(job(), placer) as r:
        r.pool.prefilled((await r.pool.next(1))[1], cached=64)
        _, work = await r.pool.next(2)
        r.pool.say(work, ord("a"), ord("b"), cached=69, transferred=69)
        r.pool.say(work, error=LOST)
        where, leg = await r.pool.next(3)
        assert where == "p" and leg.prefill_only and leg.prior == [ord("a"), ord("b")]
        assert placer.asks[1].tokens == len(PROMPT) + 2
        r.pool.prefilled(leg, cached=96)
        where, work = await r.pool.next(4)
        assert where == "e" and work.prior == [ord("a"), ord("b")]
        assert work.sampling.max_tokens == 2
        assert work.transfer is not None and work.transfer.tokens == len(PROMPT) + 2
        abcd(r, work, cached=71, transferred=71)
        await r.task
        assert r.text == {0: "abcd"} and r.usage.cached_tokens == 64
        assert r.count("transfers_total", result="used") == 2
        assert r.count("transfers_total", result="failed") == 0
        r.assert_nothing_left()


@pytest.mark.parametrize(
    ("error", "let_go"),
    [
        (Internal("boom", reason="ENGINE_ERROR"), 0),
        (FailedPrecondition("no", reason="UNSUPPORTED"), 1),
        (InvalidRequest("what?", field="transfer"), 1),
    ],
)
async def test_a_handle_that_harms(error: ForebayError, let_go: int) -> None:
    """A decode leg that fails at once may have failed by the handle: it is tried without."""
    placer = FakePlacer(placement("d", "p"))
    async with running(job(), placer) as r:
        r.pool.prefilled((await r.pool.next(1))[1])
        r.pool.say((await r.pool.next(2))[1], ended=Ended.ERROR, error=error)
        where, work = await r.pool.next(3)
        assert where == "d" and work.transfer is None
        assert placer.asks[1].whole and placer.asks[1].admitted and not placer.asks[1].excluded
        assert len(r.pool.let_go) == let_go
        r.pool.say(work, ended=Ended.ERROR, error=Internal("boom", reason="ENGINE_ERROR"))
        with pytest.raises(UpstreamFailed):
            await r.task
        assert len(r.pool.started) == 3
        r.assert_nothing_left()


async def test_resume_unsupported_is_told_as_ever() -> None:
    placer = FakePlacer(placement("d"), placement("e", "p"))
    async with running(job(), placer) as r:
        _, work = await r.pool.next(1)
        r.pool.say(work, ord("a"), cached=0)
        r.pool.say(work, error=LOST)
        _, leg = await r.pool.next(2)
        r.pool.prefilled(leg)
        _, work = await r.pool.next(3)
        unsupported = FailedPrecondition("seed", reason="RESUME_UNSUPPORTED")
        r.pool.say(work, ended=Ended.ERROR, error=unsupported)
        with pytest.raises(ApiError) as told:
            await r.task
        assert told.value.code == "worker_lost"
        assert r.count("migrations_total", result="unsupported") == 1
        # That worker did not begin with it, so the KV is nobody's.
        assert r.pool.let_go == [f"kv-{leg.request_id}"]
        r.assert_nothing_left()


async def test_client_leaves_while_the_prompt_is_computed() -> None:
    placer = FakePlacer(placement("d", "p"))
    async with running(job(), placer) as r:
        await r.pool.next(1)
        r.task.cancel()
        await asyncio.gather(r.task, return_exceptions=True)
        assert placer.released == [(placer.answers[0], False)]
        assert r.count("prefill_legs_total", result="left") == 1
        r.assert_nothing_left()


@pytest.mark.parametrize("worker", ["p", "d"])
async def test_client_leaves_while_a_worker_is_connected(worker: str) -> None:
    placer = FakePlacer(placement("d", "p"))
    never = {worker: asyncio.Event()}
    async with running(job(), placer, connecting=never) as r:
        if worker == "d":
            _, leg = await r.pool.next(1)
            r.pool.prefilled(leg)
        await r.pool.until(lambda: worker in r.pool.waiting)
        r.task.cancel()
        await asyncio.gather(r.task, return_exceptions=True)
        pair = placer.answers[0]
        if worker == "p":
            assert {p.attempt_id for p, _ in placer.released} == {
                pair.attempt_id,
                pair.prefill.attempt_id,
            }
        else:
            assert placer.released == [(pair, False)]
            assert r.pool.let_go == [f"kv-{leg.request_id}"]
        r.assert_nothing_left()


async def test_client_leaves_with_the_end_of_the_prefill_unread() -> None:
    placer = FakePlacer(placement("d", "p"))
    async with running(job(), placer) as r:
        _, leg = await r.pool.next(1)
        r.pool.prefilled(leg)
        r.task.cancel()
        await asyncio.gather(r.task, return_exceptions=True)
        assert r.pool.let_go == [f"kv-{leg.request_id}"]
        r.assert_nothing_left()


@pytest.mark.parametrize("written", [True, False], ids=["told", "queued"])
async def test_client_leaves_while_decoding(written: bool) -> None:
    placer = FakePlacer(placement("d", "p"))
    async with running(job(), placer, writing=written) as r:
        _, leg = await r.pool.next(1)
        r.pool.prefilled(leg)
        _, work = await r.pool.next(2)
        assert set(r.pool.running) == {work.request_id}
        r.task.cancel()
        await asyncio.gather(r.task, return_exceptions=True)
        assert r.pool.let_go == ([] if written else [f"kv-{leg.request_id}"])
        assert not placer.released
        r.assert_nothing_left()


async def test_several_choices_stay_whole() -> None:
    placer = FakePlacer(placement("d", "p"))
    async with running(job(n=2), placer) as r:
        await r.pool.next(2)
        assert [worker for worker, _ in r.pool.started] == ["d", "d"]
        assert placer.asks[0].whole
        assert placer.released == [(placer.answers[0].prefill, False)]
        for _, work in r.pool.started:
            abcd(r, work)
        await r.task
        assert r.text == {0: "abcd", 1: "abcd"}
        r.assert_nothing_left()


@pytest.mark.parametrize("wishes", [Wishes(worker="d"), Wishes(rank=1)])
async def test_a_named_worker_does_all(wishes: Wishes) -> None:
    placer = FakePlacer(placement("d"))
    now = asyncio.get_running_loop().time()
    async with running(job(caller=Caller("r", now + 60, wishes=wishes)), placer) as r:
        abcd(r, (await r.pool.next(1))[1])
        await r.task
        assert placer.asks[0].whole


async def test_prompts_are_prefilled_side_by_side() -> None:
    """No prompt of a request waits for the prefill of another one."""
    placer = FakePlacer(placement("d", "p"))
    async with running(job(prompts=3), placer) as r:
        await r.pool.next(3)
        legs = [work for _, work in r.pool.started]
        assert all(leg.prefill_only for leg in legs)
        for leg in reversed(legs):
            r.pool.prefilled(leg, cached=32)
        await r.pool.next(6)
        for _, work in r.pool.started[3:]:
            abcd(r, work, cached=69, transferred=69)
        await r.task
        assert r.text == {0: "abcd", 1: "abcd", 2: "abcd"}
        assert r.usage.cached_tokens == 96
        r.assert_nothing_left()


async def test_patient_reader() -> None:
    """An answer that is not streamed goes the same way."""
    sampling = Sampling(max_tokens=4)
    placer = FakePlacer(placement("d", "p"))
    async with running(job(sampling=sampling, restartable=True), placer) as r:
        r.pool.prefilled((await r.pool.next(1))[1], cached=64)
        abcd(r, (await r.pool.next(2))[1], cached=69, transferred=69)
        await r.task
        assert r.text == {0: "abcd"} and r.usage.cached_tokens == 64


async def test_adapters_go_along() -> None:
    a_job = job()
    a_job.served.adapter = Adapter("org/lora", "/adapters/abc")  # type: ignore[misc]
    async with running(a_job, FakePlacer(placement("d", "p"))) as r:
        _, leg = await r.pool.next(1)
        assert leg.adapter == "org/lora"


class Chaos(FakePlacer):
    """Names one of three pairs, or one worker for all."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dice = dice
        self.given: list[Placement] = []

    async def place(self, ask: Ask) -> Placement:
        self.asks.append(ask)
        await asyncio.sleep(0)
        prefill = self.dice.choice(["p", "q", ""])
        made = placement(self.dice.choice("def"), "" if ask.whole else prefill)
        self.given.append(made)
        return made


async def live(r: Rig, dice: random.Random, handles: list[str]) -> None:
    """Lets the workers say something, anything, to one sequence after the other."""
    while not r.task.done():
        for _ in range(dice.randrange(4)):
            await asyncio.sleep(0)
        lost = {w: WorkerLost("no", refused=dice.random() < 0.5) for w in "pqdef"}
        r.pool.unreachable = {w: x for w, x in lost.items() if dice.random() < 0.1}
        r.pool.writing = dice.random() < 0.8
        if dice.random() < 0.02:
            r.task.cancel()
        running = list(r.pool.running.values())
        if not running:
            await asyncio.sleep(0)
            continue
        work = dice.choice(running)
        dies = dice.random()
        if dies < 0.08:
            r.pool.say(work, error=LOST)
        elif dies < 0.12:
            r.pool.say(work, ended=Ended.ABORT)
        elif dies < 0.16:
            reason = dice.choice(["DRAINING", "ENGINE_DEAD"])
            r.pool.say(work, ended=Ended.ERROR, error=Unavailable("", reason=reason))
        elif dies < 0.20 and (work.transfer or work.prefill_only) and work.request_id not in r.said:
            r.pool.say(work, ended=Ended.ERROR, error=Internal("", reason="ENGINE_ERROR"))
        elif work.prefill_only and dies < 0.9:
            handles.append(f"kv-{work.request_id}")
            r.pool.prefilled(work)
        elif work.prefill_only:
            r.pool.say(work, 7, ended=Ended.LENGTH)
        else:
            said = r.said.setdefault(work.request_id, len(work.prior))
            r.said[work.request_id] = said + 1
            end = Ended.LENGTH if said == 3 else None
            used = 69 if work.transfer is not None and dice.random() < 0.8 else 0
            cached = None if said > len(work.prior) else max(used, 3)
            r.pool.say(work, ord("abcd"[said]), cached=cached, transferred=used, ended=end)


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_nothing_is_left(seed: int) -> None:
    """Every answer is right or an error that may be told, and nobody holds anything for it."""
    dice = random.Random(seed)
    whole = left = failed = 0
    for _ in range(50):
        handles: list[str] = []
        placer = Chaos(dice)
        prompts = dice.choice([1, 1, 2])
        async with running(job(prompts=prompts), placer) as r:
            await live(r, dice, handles)
            (outcome,) = await asyncio.gather(r.task, return_exceptions=True)
            if outcome is None:
                assert r.text == {i: "abcd" for i in range(prompts)}
                whole += 1
            elif isinstance(outcome, asyncio.CancelledError):
                left += 1
            else:
                assert isinstance(outcome, ApiError) and outcome.status == 503, outcome
                failed += 1
            r.assert_nothing_left()
            told = {w.transfer.name for _, w in r.pool.started if w.transfer and w.transfer.given}
            assert len(r.pool.let_go) == len(set(r.pool.let_go))
            assert told | set(r.pool.let_go) == set(handles)
            sent = {w.attempt_id for _, w in r.pool.started}
            back = [p.attempt_id for p, _ in placer.released]
            assert len(back) == len(set(back))
            for made in placer.given:
                assert (made.attempt_id in sent) != (made.attempt_id in back)
                if made.prefill is not None:
                    assert {made.prefill.attempt_id} & {*sent, *back}
            legs = [w for _, w in r.pool.started if w.prefill_only]
            assert len(legs) <= 2 * prompts
    assert whole > 20 and left + failed > 0
