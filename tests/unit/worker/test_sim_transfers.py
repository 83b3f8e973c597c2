"""KV that a simulated engine takes from another one: time, blocks, and what is told of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import BlockKey
from services.worker.config import WorkerSettings
from services.worker.core.blocks import BlockMirror, CopiesAdded
from services.worker.core.model import FinishReason, Sampling
from services.worker.engines.port import EngineRequest, Output, TransferNews
from services.worker.engines.sim.core.model import (
    SimConfig,
    SimEnd,
    SimOutput,
    SimRequest,
    SimStep,
)
from services.worker.engines.sim.core.published import SHAPES, published
from services.worker.engines.sim.core.simulator import Simulator
from services.worker.engines.sim.core.timing import TimingProfile, profile_from
from services.worker.engines.sim.engine import SimEngine
from services.worker.engines.sim.folder import simulated_model

PLAIN = TimingProfile(
    "plain", "made up", token_s=0.001, transfer_token_s=0.0001, transfer_latency_s=0.002
)
"""A millisecond a token, a tenth of one to bring it, and two for asking."""
SMALL = SimConfig(PLAIN, capacity_blocks=64, block_size=4, max_batched_tokens=16, max_running=4)


def request(id: str, prompt: int, output: int, salt: int = 0, *, come: int = 0) -> SimRequest:
    """A request whose blocks are those of all others of the same salt; `come` are transferred."""
    keys = [BlockKey(salt * 1000 + i) for i in range((prompt + output) // 4)]
    return SimRequest(id, prompt, output, keys, transfer_tokens=come)


def run(sim: Simulator, until: float = float("inf")) -> list[SimStep]:
    steps: list[SimStep] = []
    while (at := sim.next_time()) is not None and at <= until:
        steps += sim.advance(at)
        sim.check_invariants()
    return steps


def first(steps: list[SimStep], id: str) -> tuple[float, SimOutput]:
    return next((s.ended, o) for s in steps for o in s.outputs if o.id == id and o.tokens)


def test_a_transfer_takes_its_own_time_and_the_last_token_is_computed() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 40, 3, come=40), 5.0)
    steps = run(sim)
    at, output = first(steps, "a")
    assert at == pytest.approx(5.0 + 0.002 + 40 * 0.0001 + 0.001)
    assert (output.cached_tokens, output.transferred_tokens) == (39, 39)
    assert output.queued_s == 0
    assert [s.prefill_tokens for s in steps] == [1, 0, 0]
    assert [o.transferred_tokens for s in steps for o in s.outputs] == [39, 0, 0]
    assert (sim.pool.used, sim.load().pending_prefill_tokens) == (0, 0)
    told = [(s.number, t.id, t.tokens) for s in steps for t in s.transfers]
    assert told == [(1, "a", 40)]  # with the first token at the latest
    assert steps[0].transfers[0].seconds == pytest.approx(0.002 + 40 * 0.0001)


def test_others_run_meanwhile() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 8, 20), 0.0)
    run(sim, until=0.008)
    sim.submit(request("b", 40, 1, salt=1, come=40), 0.0081)
    steps = run(sim)
    times = [s.ended for s in steps for o in s.outputs if o.id == "a"]
    # One of a's steps has b's last token in it; no other one is any longer.
    gaps = [round(y - x, 6) for x, y in itertools.pairwise(times)]
    assert sorted(gaps) == [0.001] * 17 + [0.002]
    at, _ = first(steps, "b")
    assert 0.009 + 0.006 + 0.001 <= at <= 0.009 + 0.006 + 0.003


def test_its_blocks_are_taken_at_once_and_hit_from_the_end_on() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 40, 5, come=40), 0.0)
    sim.submit(request("b", 4, 1, salt=1), 0.0)
    steps = run(sim, until=0.004)  # b is computed
    assert steps[-1].load.used_blocks == 10
    assert steps[-1].load.pending_prefill_tokens == 1
    assert not any(0 in c.keys for s in steps for c in s.changes if isinstance(c, CopiesAdded))
    sim.submit(request("c", 41, 1), 0.0041)
    steps = run(sim)
    told = [c.keys for s in steps for c in s.changes if isinstance(c, CopiesAdded)]
    assert tuple(range(10)) in told
    _, output = first(steps, "c")
    assert output.cached_tokens == 0  # it began before a's had arrived
    sim.submit(request("d", 41, 1), 1.0)
    _, output = first(run(sim), "d")
    assert output.cached_tokens == 40


def test_what_is_here_already_is_not_brought() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 20, 1), 0.0)
    run(sim)
    sim.submit(request("b", 40, 1, come=40), 1.0)
    at, output = first(run(sim), "b")
    assert at == pytest.approx(1.0 + 0.002 + 20 * 0.0001 + 0.001)
    assert (output.cached_tokens, output.transferred_tokens) == (39, 19)


def test_part_of_a_prompt_is_brought_and_the_rest_computed() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 40, 1, come=32), 0.0)
    at, output = first(run(sim), "a")
    assert at == pytest.approx(0.002 + 32 * 0.0001 + 8 * 0.001)
    assert (output.cached_tokens, output.transferred_tokens) == (32, 32)


def test_transfers_share_a_wire() -> None:
    sim = Simulator(SMALL)
    for i in range(3):
        sim.submit(request(f"r{i}", 40, 1, salt=i, come=40), 0.0)
    steps = run(sim)
    times = [first(steps, f"r{i}")[0] for i in range(3)]
    assert times == [pytest.approx((i + 1) * 0.006 + 0.001) for i in range(3)]
    # Each is told with its own time, not with what it waited for the wire.
    assert [t.seconds for s in steps for t in s.transfers] == [pytest.approx(0.006)] * 3


def test_no_seat_and_no_budget_is_used_before_the_end() -> None:
    sim = Simulator(replace(SMALL, max_running=1))
    sim.submit(request("a", 40, 1, salt=1, come=40), 0.0)
    sim.submit(request("b", 4, 1, salt=2), 0.0)
    steps = run(sim)
    assert first(steps, "b")[0] == pytest.approx(0.004)
    assert first(steps, "a")[0] == pytest.approx(0.007)


def test_who_has_its_blocks_goes_first() -> None:
    """Else one that waits for room would wait for blocks of one that waits behind it."""
    sim = Simulator(replace(SMALL, capacity_blocks=16))
    sim.submit(request("a", 40, 1, salt=1, come=40), 0.0)
    sim.submit(request("b", 60, 1, salt=2), 0.0001)
    steps = run(sim)
    assert first(steps, "a")[0] == pytest.approx(0.007)
    assert first(steps, "b")[0] == pytest.approx(0.007 + 0.060)


@pytest.mark.parametrize("aborted", [False, True])
def test_what_has_arrived_can_be_hit_before_there_is_a_seat(aborted: bool) -> None:
    sim = Simulator(replace(SMALL, max_running=1))
    sim.submit(request("b", 40, 1, come=40), 0.0)
    sim.submit(request("a", 4, 30, salt=1), 0.0)
    steps = run(sim, until=0.020)
    assert set(range(10)) <= set(sim.pool.held())
    assert not any(o.id == "b" for s in steps for o in s.outputs)
    if aborted:
        sim.abort("b", 0.0201)
    steps = run(sim)
    ends = {o.id: o.end for s in steps for o in s.outputs if o.end}
    assert ends == {"a": SimEnd.LENGTH, "b": SimEnd.ABORT if aborted else SimEnd.LENGTH}


def test_a_transfer_that_does_not_fit_waits() -> None:
    sim = Simulator(replace(SMALL, capacity_blocks=16))
    sim.submit(request("a", 40, 5, salt=1), 0.0)
    sim.submit(request("b", 40, 1, salt=2, come=40), 0.0)
    at, output = first(run(sim), "b")
    assert at == pytest.approx(0.044 + 0.006 + 0.001)
    assert output.queued_s == pytest.approx(0.044)


def test_an_abort_gives_back_what_a_transfer_had_taken() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 40, 5, come=40), 0.0)
    run(sim, until=0.001)
    assert sim.load().used_blocks == 10
    sim.abort("a", 0.003)
    steps = run(sim)
    assert [o.end for s in steps for o in s.outputs] == [SimEnd.ABORT]
    assert not any(s.transfers for s in steps)
    assert sim.load().used_blocks == 0 and sim.next_time() is None
    sim.submit(request("b", 41, 1), 1.0)
    _, output = first(run(sim), "b")
    assert output.cached_tokens == 0  # nothing of it had arrived


def test_who_is_pushed_out_computes_what_it_had_been_brought() -> None:
    sim = Simulator(replace(SMALL, capacity_blocks=12))
    sim.submit(request("a", 20, 20, salt=1), 0.0)
    run(sim, until=0.020)
    sim.submit(request("b", 20, 6, salt=2, come=20), 0.0201)
    steps = run(sim)
    assert sum(s.preempted for s in steps) == 1
    outputs = [o for s in steps for o in s.outputs if o.id == "b"]
    assert [o.transferred_tokens for o in outputs] == [19, 0, 0, 0, 0, 0]
    assert sum(s.prefill_tokens for s in steps) > 1


def test_all_room_taken_by_what_is_on_its_way() -> None:
    """The only one that runs needs a block, and none is free: it starts again after the others."""
    sim = Simulator(replace(SMALL, capacity_blocks=16))
    sim.submit(request("a", 23, 5, salt=1), 0.0)
    run(sim, until=0.0225)
    sim.submit(request("b", 40, 1, salt=2, come=40), 0.0226)
    steps = run(sim)
    assert {o.id for s in steps for o in s.outputs if o.end} == {"a", "b"}
    assert sum(o.tokens for s in steps for o in s.outputs) <= 6
    assert sum(s.preempted for s in steps) == 1


@pytest.mark.parametrize("come", [-1, 41])
def test_no_more_comes_than_the_prompt_has(come: int) -> None:
    with pytest.raises(ValueError, match="transferred"):
        Simulator(SMALL).submit(request("a", 40, 1, come=come), 0.0)


def test_log_probabilities_of_a_prompt_are_computed() -> None:
    sim = Simulator(SMALL)
    sim.submit(replace(request("a", 40, 1, come=40), recompute=True), 0.0)
    at, output = first(run(sim), "a")
    assert at == pytest.approx(0.040)
    assert (output.cached_tokens, output.transferred_tokens) == (0, 0)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9), capacity=st.integers(12, 40), seats=st.integers(1, 5))
def test_any_mix_ends_whole_and_its_changes_tell_what_is_held(
    seed: int, capacity: int, seats: int
) -> None:
    rng = random.Random(seed)
    sim = Simulator(replace(SMALL, capacity_blocks=capacity, max_running=seats))
    mirror = BlockMirror()
    steps: list[SimStep] = []
    wanted: dict[str, int] = {}
    aborted: set[str] = set()
    now = 0.0
    for i in range(25):
        prompt, output = rng.randint(1, 40), rng.randint(1, 7)
        come = rng.choice([0, prompt, prompt, rng.randint(0, prompt)])
        one = request(f"r{i}", prompt, output, rng.randint(0, 4), come=come)
        one.priority = rng.choice([0, 0, 1])
        wanted[one.id] = output
        sim.submit(one, now)
        if rng.random() < 0.2:
            victim = f"r{rng.randint(0, i)}"
            aborted.add(victim)
            sim.abort(victim, now)
        now += rng.choice([0.0, 0.0005, 0.004, 0.03])
        steps += run(sim, until=now)
    steps += run(sim)
    for step in steps:
        mirror.apply(step.changes)
    ends = [o for s in steps for o in s.outputs if o.end]
    assert sorted(o.id for o in ends) == sorted(wanted)
    for output in ends:
        assert output.end is SimEnd.LENGTH or output.id in aborted
        if output.end is SimEnd.LENGTH:
            made = sum(o.tokens for s in steps for o in s.outputs if o.id == output.id)
            assert made == wanted[output.id]
    assert {k for tier in mirror.blocks() for k in tier.keys} == set(sim.pool.held())
    assert not mirror.unknown_drops and not sim.pool.used
    assert sim.load().pending_prefill_tokens == 0


def test_published_profiles_say_how_fast_kv_travels() -> None:
    profile = published("h100/llama-3.1-8b")
    shape = SHAPES["llama-3.1-8b"]
    assert profile.transfer_token_s == pytest.approx(shape.kv_token_bytes / 12.5e9)
    assert profile.transfer_latency_s > 0
    assert published("h200/qwen2.5-32b").transfer_token_s > profile.transfer_token_s
    table = {"name": "x", "source": "y", "token_s": 0.001}
    assert profile_from(table).transfer_token_s == profile.transfer_token_s
    assert profile_from({**table, "transfer_token_s": 0.5}).transfer_token_s == 0.5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "tiny"
    model.mkdir()
    config = {"vocab_size": 100, "max_position_embeddings": 4096, "eos_token_id": 7}
    (model / "config.json").write_text(json.dumps(config))
    return model


class Engine:
    """A simulated engine, and what it said."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self.outputs: dict[str, list[Output]] = {}
        self.transfers: list[TransferNews] = []
        self._news = asyncio.Event()
        engine.listen(self._on_step, lambda dead: None)

    def _on_step(self, step: Any) -> None:
        self.transfers += step.transfers
        for output in step.outputs:
            self.outputs.setdefault(output.id, []).append(output)
        self._news.set()

    async def run(self, id: str, prompt: list[int], **more: Any) -> list[Output]:
        sampling = more.pop("sampling", Sampling(max_tokens=6, temperature=0.0))
        self.engine.submit(EngineRequest(id, tuple(prompt), sampling, **more))
        async with asyncio.timeout(10):
            while not any(o.finish for o in self.outputs.get(id, ())):
                self._news.clear()
                await self._news.wait()
        return self.outputs[id]


@asynccontextmanager
async def engines(folder: Path, count: int) -> AsyncIterator[list[Engine]]:
    model = simulated_model(WorkerSettings(model=str(folder), engine="sim"))
    made = [SimEngine(model.profile, model.config, model.vocabulary) for _ in range(count)]
    try:
        yield [Engine(engine) for engine in made]
    finally:
        for engine in made:
            engine.close()


def tokens(outputs: list[Output]) -> list[int]:
    return [t for o in outputs for t in o.token_ids]


PROMPT = [1 + i % 90 for i in range(100)]


async def test_from_one_engine_to_another(folder: Path) -> None:
    async with engines(folder, 2) as (prefill, decode):
        assert prefill.engine.profile.transfer == "sim"
        leg = await prefill.run("p", PROMPT, prefill_only=True)
        assert [len(o.token_ids) for o in leg] == [1]
        assert leg[0].finish is FinishReason.LENGTH and leg[0].cached_tokens == 0
        assert leg[0].transfer is not None
        passed = json.loads(json.dumps(leg[0].transfer))
        prefill.engine.release_transfer("p")  # nothing is held
        outputs = await decode.run("d", PROMPT, transfer=passed)
        assert (outputs[0].cached_tokens, outputs[0].transferred_tokens) == (99, 99)
        (news,) = decode.transfers
        assert (news.id, news.tokens, news.why) == ("d", 112, "")  # whole blocks of 16
        assert news.bytes == 112 * SHAPES["llama-3.1-8b"].kv_token_bytes
        assert news.seconds == pytest.approx(0.002 + 100 * 131_072 / 12.5e9)
        assert all(o.transfer is None for o in outputs)
        whole = await prefill.run("w", PROMPT)
        assert tokens(outputs) == tokens(whole) and len(tokens(whole)) == 6
        assert (whole[0].cached_tokens, whole[0].transferred_tokens) == (96, 0)
        again = await decode.run("e", [*PROMPT, 5])
        assert again[0].cached_tokens == 96


@pytest.mark.parametrize(
    "change",
    [
        lambda h: {**h, "tokens": 99},
        lambda h: {**h, "last": "00" * 32},
        lambda h: {**h, "tail": [1, 2, 3, 4]},
        lambda h: {"do_remote_prefill": True},
        lambda h: {},
    ],
)
async def test_a_handle_of_something_else_is_as_good_as_none(folder: Path, change: Any) -> None:
    async with engines(folder, 2) as (prefill, decode):
        leg = await prefill.run("p", PROMPT, prefill_only=True)
        outputs = await decode.run("d", PROMPT, transfer=change(leg[0].transfer))
        assert (outputs[0].cached_tokens, outputs[0].transferred_tokens) == (0, 0)


async def test_nothing_ends_a_prefill_otherwise(folder: Path) -> None:
    """Not the end token, not a stop id: those are for the engine that decodes."""
    every = Sampling(max_tokens=50, stop_token_ids=tuple(range(100)), temperature=0.0)
    async with engines(folder, 1) as (engine,):
        leg = await engine.run("p", PROMPT, sampling=every, prefill_only=True)
        assert leg[-1].finish is FinishReason.LENGTH and leg[-1].stop_token_id is None
        assert len(tokens(leg)) == 1 and leg[-1].transfer is not None
        whole = await engine.run("w", PROMPT, sampling=every)
        assert whole[-1].finish is FinishReason.STOP and whole[-1].transfer is None
