"""The simulated engine's scheduler: batches, chunks, hits, preemption and time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import BlockKey
from services.worker.core.blocks import AllDropped, BlockMirror, CopiesAdded, CopiesDropped
from services.worker.engines.sim.core.filling import document, documents
from services.worker.engines.sim.core.lower import LowerTier
from services.worker.engines.sim.core.model import SimConfig, SimEnd, SimLoad, SimRequest, SimStep
from services.worker.engines.sim.core.simulator import Simulator
from services.worker.engines.sim.core.timing import TimingProfile

PLAIN = TimingProfile("plain", "made up", token_s=0.001)
"""A millisecond a token, and nothing else."""
SMALL = SimConfig(PLAIN, capacity_blocks=64, block_size=4, max_batched_tokens=16, max_running=4)


def request(id: str, prompt: int, output: int, salt: int = 0, **more: int) -> SimRequest:
    """A request whose blocks are those of all others of the same salt."""
    keys = [BlockKey(salt * 1000 + i) for i in range((prompt + output) // 4)]
    return SimRequest(id, prompt, output, keys, **more)


def run(sim: Simulator, until: float = float("inf")) -> list[SimStep]:
    steps: list[SimStep] = []
    while (at := sim.next_time()) is not None and at <= until:
        steps += sim.advance(at)
        sim.check_invariants()
    return steps


def first(steps: list[SimStep], id: str) -> float:
    return next(s.ended for s in steps for o in s.outputs if o.id == id and o.tokens)


def end(steps: list[SimStep], id: str) -> float:
    return next(s.ended for s in steps for o in s.outputs if o.id == id and o.end)


def test_a_prompt_is_computed_in_chunks_and_decoded_token_by_token() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 40, 3), 5.0)
    steps = run(sim)
    assert [s.prefill_tokens for s in steps] == [16, 16, 8, 0, 0]
    assert first(steps, "a") == pytest.approx(5.040)
    assert end(steps, "a") == pytest.approx(5.042)
    assert [o.tokens for s in steps for o in s.outputs] == [1, 1, 1]
    assert steps[-1].outputs[0].end is SimEnd.LENGTH
    assert (sim.steps, sim.pool.used, sim.next_time()) == (5, 0, None)


def test_time_follows_the_profile() -> None:
    profile = TimingProfile(
        "all", "made up", 0.001, 0.5, pair_s=0.01, sequence_s=0.1, kv_token_s=0.02, overhead_s=1.0
    )
    sim = Simulator(replace(SMALL, profile=profile))
    sim.submit(request("a", 10, 2), 0.0)
    prompt, decode = run(sim)
    assert prompt.ended == pytest.approx(1.0 + 0.5 + 50 * 0.01 + 0.1)
    assert decode.ended - decode.began == pytest.approx(1.0 + 0.5 + 0.1 + 10 * 0.02)


def test_decodes_share_steps_with_chunks() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 8, 10), 0.0)
    run(sim, until=0.010)
    sim.submit(request("b", 30, 1, salt=1), 0.0102)
    steps = run(sim)
    both = [s for s in steps if s.prefill_tokens and any(o.id == "a" for o in s.outputs)]
    assert [s.prefill_tokens for s in both] == [15, 15]


def test_what_is_cached_is_not_computed_but_for_the_last_token() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 32, 1), 0.0)
    sim.submit(request("b", 32, 1), 1.0)
    steps = run(sim)
    sim.submit(request("c", 33, 1), 2.0)
    sim.submit(SimRequest("d", 33, 1, request("", 33, 1).keys, recompute=True), 3.0)
    steps += run(sim)
    cached = {o.id: o.cached_tokens for s in steps for o in s.outputs}
    assert cached == {"a": 0, "b": 28, "c": 32, "d": 0}


def test_equal_prompts_in_one_step_are_computed_once() -> None:
    sim = Simulator(replace(SMALL, max_batched_tokens=64))
    for name in "abc":
        sim.submit(request(name, 17, 1), 0.0)
    (step,) = run(sim)
    assert {o.id: o.cached_tokens for o in step.outputs} == {"a": 0, "b": 16, "c": 16}
    assert step.prefill_tokens == 19


def test_seats_and_blocks_keep_requests_waiting_in_order_of_priority() -> None:
    sim = Simulator(replace(SMALL, max_running=1))
    sim.submit(request("a", 8, 4), 0.0)
    sim.advance(0.0)
    sim.submit(request("late", 8, 1, salt=1, priority=1), 0.0)
    sim.submit(request("early", 8, 1, salt=2, priority=-1), 0.001)
    steps = run(sim)
    assert first(steps, "a") < first(steps, "early") < first(steps, "late")
    queued = {o.id: o.queued_s for s in steps for o in s.outputs if o.queued_s is not None}
    assert queued["a"] == 0
    assert queued["early"] == pytest.approx(end(steps, "a") - 0.001)


def test_a_prompt_that_does_not_fit_waits_and_holds_back_those_behind_it() -> None:
    sim = Simulator(replace(SMALL, capacity_blocks=10))
    sim.submit(request("a", 20, 5), 0.0)
    sim.advance(0.0)
    sim.submit(request("big", 24, 1, salt=1), 0.001)
    sim.submit(request("small", 4, 1, salt=2), 0.001)
    steps = run(sim)
    assert end(steps, "a") <= first(steps, "big")
    assert end(steps, "a") < first(steps, "small")


def test_the_last_in_order_gives_its_blocks_to_the_first() -> None:
    sim = Simulator(replace(SMALL, capacity_blocks=8))
    sim.submit(request("a", 13, 16), 0.0)
    sim.submit(request("b", 12, 16, salt=1), 0.0)
    steps = run(sim)
    assert sum(s.preempted for s in steps) >= 1
    assert end(steps, "a") < end(steps, "b")
    tokens = {id: sum(o.tokens for s in steps for o in s.outputs if o.id == id) for id in "ab"}
    assert tokens == {"a": 16, "b": 16}
    assert [o.cached_tokens for s in steps for o in s.outputs if o.id == "b"].count(None) == 15


def test_blocks_of_outputs_are_hit_too() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 16, 9), 0.0)
    run(sim)
    sim.submit(request("b", 25, 1), 1.0)
    assert run(sim)[-1].outputs[0].cached_tokens == 24


def test_blocks_without_keys_are_never_hit() -> None:
    sim = Simulator(SMALL)
    for name in "ab":
        sim.submit(SimRequest(name, 16, 9), 0.0)
    steps = run(sim)
    assert not any(s.changes for s in steps)
    assert {o.cached_tokens for s in steps for o in s.outputs} == {0, None}


def test_an_abort_takes_effect_when_the_step_ends() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 64, 5), 0.0)
    sim.submit(request("b", 8, 5, salt=1), 0.0)
    sim.advance(0.0)
    sim.abort("a", 0.010)
    sim.abort("b", 0.010)
    sim.abort("never", 0.010)
    assert sim.advance(0.015) == []
    steps = sim.advance(0.016)
    assert [(o.id, o.end) for o in steps[-1].outputs] == [("a", "abort"), ("b", "abort")]
    assert (steps[-1].count, sim.next_time(), sim.load().used_blocks) == (0, None, 0)
    sim.check_invariants()


def test_the_context_ends_a_request() -> None:
    sim = Simulator(replace(SMALL, max_model_len=20))
    sim.submit(request("a", 15, 50), 0.0)
    steps = run(sim)
    assert sum(o.tokens for s in steps for o in s.outputs) == 5


@pytest.mark.parametrize("prompt", [0, 256])
def test_prompts_out_of_bounds_are_refused(prompt: int) -> None:
    with pytest.raises(ValueError, match="1 to 255"):
        Simulator(SMALL).submit(SimRequest("a", prompt, 1), 0.0)


def test_a_name_in_use_is_refused() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 8, 1), 0.0)
    with pytest.raises(ValueError, match="runs already"):
        sim.submit(request("a", 8, 1), 0.0)


def test_a_sampler_ends_requests_and_names_blocks() -> None:
    keys: list[BlockKey] = []
    seen: list[str] = []

    def sample(id: str) -> bool:
        seen.append(id)
        keys.append(BlockKey(len(seen)))
        return len(seen) == 3

    sim = Simulator(SMALL, sample)
    sim.submit(SimRequest("a", 4, 9, keys), 0.0)
    steps = run(sim)
    assert steps[-1].outputs[0].end is SimEnd.STOP
    assert seen == ["a"] * 3


def test_a_held_engine_ends_no_step() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 8, 2), 0.0)
    sim.advance(0.0)
    sim.hold(3.0)
    assert sim.advance(2.9) == []
    steps = run(sim)
    assert first(steps, "a") == 3.0
    sim.hold(9.0)
    sim.submit(request("b", 8, 1), 4.0)
    assert first(run(sim), "b") >= 9.0


def test_a_slow_engine_takes_longer() -> None:
    sim = Simulator(SMALL)
    sim.slow = 3.0
    sim.submit(request("a", 10, 1), 0.0)
    assert first(run(sim), "a") == pytest.approx(0.030)


def test_reset_forgets_all_unless_requests_use_blocks() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 32, 2), 0.0)
    assert sim.reset(0.0) is None
    run(sim)
    step = sim.reset(9.0)
    assert step is not None
    assert step.changes == [AllDropped()]
    sim.submit(request("b", 32, 1), 10.0)
    assert run(sim)[-1].outputs[0].cached_tokens == 0


def test_steps_told_together_take_the_same_time_and_stop_for_arrivals() -> None:
    profile = replace(PLAIN, kv_token_s=1e-4, overhead_s=0.01)
    alone = replace(SMALL, profile=profile)
    ends: dict[float, dict[str, float]] = {}
    for coalesce_s in (0.0, 10.0):
        sim = Simulator(replace(alone, coalesce_s=coalesce_s))
        sim.submit(request("a", 8, 60), 0.0)
        steps = run(sim, until=0.0) + sim.advance(0.2)
        sim.submit(request("b", 20, 30, salt=1), 0.2005)
        steps += run(sim)
        if coalesce_s:
            assert max(s.count for s in steps) > 10
        assert sim.steps == sum(s.count for s in steps)
        ends[coalesce_s] = {
            "b first": first(steps, "b"),
            "a": end(steps, "a"),
            "b": end(steps, "b"),
        }
    assert ends[10.0] == pytest.approx(ends[0.0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([0.0, 0.05]), st.booleans())
def test_any_mix_ends_whole_and_its_changes_tell_what_is_held(
    seed: int, coalesce: float, tiered: bool
) -> None:
    dice = random.Random(seed)
    config = replace(SMALL, capacity_blocks=24, coalesce_s=coalesce)
    lower = tier(40) if tiered else None
    sim = Simulator(config, lower=lower)
    mirror = BlockMirror()
    wanted: dict[str, int] = {}
    got: dict[str, int] = {}
    ended: dict[str, SimEnd] = {}
    now = 0.0

    def take(steps: list[SimStep]) -> None:
        for step in steps:
            mirror.apply(step.changes)
            for output in step.outputs:
                assert output.id not in ended
                got[output.id] = got.get(output.id, 0) + output.tokens
                if output.end:
                    ended[output.id] = output.end
        sim.check_invariants()
        if sim.next_time() is None:
            assert {k for tier in mirror.blocks() for k in tier.keys} == set(sim.pool.held())

    for number in range(dice.randrange(1, 30)):
        now += dice.random() * 0.03
        while (at := sim.next_time()) is not None and at <= now:
            take(sim.advance(at))
        id, output = f"r{number}", dice.randrange(1, 30)
        wanted[id] = output
        made = request(id, dice.randrange(1, 60), output, dice.randrange(4))
        made.priority = dice.randrange(3)
        sim.submit(made, now)
        if dice.random() < 0.2:
            sim.abort(f"r{dice.randrange(number + 1)}", now)
    while (at := sim.next_time()) is not None:
        take(sim.advance(at))
    assert ended.keys() == wanted.keys()
    assert all(got[i] == wanted[i] for i, why in ended.items() if why is SimEnd.LENGTH)
    assert mirror.unknown_drops == 0
    assert sim.load().used_blocks == sim.load().pending_prefill_tokens == 0


def test_drops_are_told_before_what_took_the_place() -> None:
    sim = Simulator(replace(SMALL, capacity_blocks=8))
    sim.submit(request("a", 24, 1), 0.0)
    run(sim)
    sim.submit(request("b", 24, 1, salt=1), 1.0)
    changes = [c for s in run(sim) for c in s.changes]
    assert isinstance(changes[0], CopiesDropped) or len(changes) > 1
    dropped = [k for c in changes if isinstance(c, CopiesDropped) for k in c.keys]
    assert dropped == [5, 4, 3, 2]


def test_an_engine_can_be_full_from_the_start() -> None:
    held = documents(3, 150)
    assert [len(d) for d in held] == [64, 64, 22]
    assert documents(4, 150)[0] == document(6)
    shared = {k for d in documents(3, 150) for k in d} & {k for d in documents(4, 150) for k in d}
    assert len(shared) == 22
    sim = Simulator(replace(SMALL, capacity_blocks=160))
    mirror = BlockMirror()
    for keys in held:
        mirror.apply(sim.fill(keys, 0.0).changes)
    sim.check_invariants()
    assert {k for tier in mirror.blocks() for k in tier.keys} == {k for d in held for k in d}
    assert set(sim.pool.held()) == {k for d in held for k in d}
    sim.submit(SimRequest("a", 4 * 64 + 1, 1, list(held[0])), 1.0)
    assert run(sim)[-1].outputs[0].cached_tokens == 4 * 64
    with pytest.raises(ValueError, match="fit"):
        sim.fill([BlockKey(i) for i in range(161)], 2.0)


def test_news_between_steps_leave_the_running_step_as_it_is() -> None:
    sim = Simulator(SMALL)
    sim.submit(request("a", 8, 2), 0.0)
    sim.advance(0.0)
    assert sim.fill([BlockKey(900)], 0.001).count == 0
    assert [s.count for s in run(sim)] == [1, 1]


CRAMPED = replace(SMALL, capacity_blocks=8, max_batched_tokens=4)


def cramped(first: int, second: int, **more: int) -> tuple[Simulator, list[SimStep]]:
    """A decode that grows beside a prompt in chunks, until blocks run out; and their priorities."""
    sim = Simulator(replace(CRAMPED, **more))
    sim.submit(request("decode", 12, 9, priority=first), 0.0)
    while not sim.load().running or sim.load().pending_prefill_tokens:
        sim.advance(sim.next_time() or 0.0)
    sim.submit(request("prompt", 16, 1, salt=1, priority=second), sim.next_time() or 0.0)
    return sim, run(sim)


def test_the_last_in_order_is_pushed_out_though_it_is_in_the_step_already() -> None:
    _, steps = cramped(first=1, second=0)
    (at,) = [i for i, s in enumerate(steps) if s.preempted]
    # The prompt gets the tokens of the step back that the other had.
    assert [s.prefill_tokens for s in steps[at - 1 : at + 1]] == [3, 4]
    assert first(steps, "prompt") < end(steps, "decode")


def test_who_is_pushed_out_before_its_first_token_keeps_its_first_count_of_cached_tokens() -> None:
    _, steps = cramped(first=0, second=1)
    assert sum(s.preempted for s in steps) == 1
    outputs = [o for s in steps for o in s.outputs if o.id == "prompt"]
    assert [o.cached_tokens for o in outputs] == [0]
    assert outputs[0].queued_s == 0


def test_nobody_starts_in_a_step_that_pushed_somebody_out() -> None:
    sim = Simulator(replace(CRAMPED, max_running=2))
    sim.submit(request("decode", 12, 9), 0.0)
    while not sim.load().running or sim.load().pending_prefill_tokens:
        sim.advance(sim.next_time() or 0.0)
    sim.submit(request("prompt", 16, 1, salt=1, priority=2), sim.next_time() or 0.0)
    sim.advance(sim.next_time() or 0.0)
    sim.submit(request("waits", 3, 1, salt=2, priority=1), sim.next_time() or 0.0)
    steps = run(sim)
    (pushed,) = [s for s in steps if s.preempted]
    assert pushed.prefill_tokens == 0


def test_blocks_of_steps_told_together_are_hit() -> None:
    sim = Simulator(replace(SMALL, coalesce_s=10.0))
    sim.submit(request("a", 4, 41), 0.0)
    assert max(s.count for s in run(sim)) > 10
    sim.submit(request("b", 45, 1), 1.0)
    assert run(sim)[-1].outputs[0].cached_tokens == 44


def test_a_held_run_of_steps_is_not_cut_to_less_than_its_hold() -> None:
    sim = Simulator(replace(SMALL, coalesce_s=10.0))
    sim.submit(request("a", 4, 60), 0.0)
    sim.advance(0.0)
    sim.advance(0.004)
    sim.hold(5.0)
    sim.submit(request("b", 4, 1, salt=1), 0.0101)
    assert sim.next_time() == 5.0


def tier(capacity: int = 100, **more: float) -> LowerTier:
    return LowerTier(capacity, **{"latency_s": 0.002, "block_s": 0.001, **more})


def with_tier(lower: LowerTier, **more: int) -> Simulator:
    """An engine of 9 blocks that computed 8 blocks of salt 0, and lost them to salt 1."""
    sim = Simulator(replace(SMALL, capacity_blocks=9, **more), lower=lower)
    for salt in (0, 1):
        sim.submit(request(f"s{salt}", 33, 1, salt=salt), 0.0)
        run(sim)
    return sim


def test_what_the_engine_lost_comes_up_from_the_tier_below() -> None:
    lower = tier()
    sim = with_tier(lower)
    assert len(lower) == 16
    assert sim.pool.match(request("", 33, 1).keys) == []
    sim.submit(request("again", 33, 1), 1.0)
    steps = run(sim)
    (output,) = steps[-1].outputs
    assert (output.cached_tokens, output.loaded_tokens) == (32, 32)
    # 2 ms and 8 x 1 ms for the load, 1 ms for the last token.
    assert steps[-1].ended == pytest.approx(1.011)
    assert output.queued_s == pytest.approx(0.010)
    assert len(sim.pool.match(request("", 33, 1).keys)) == 8


def test_a_load_that_is_no_quicker_than_computing_is_refused() -> None:
    sim = with_tier(tier(block_s=0.004))
    sim.submit(request("again", 33, 1), 1.0)
    steps = run(sim)
    assert steps[-1].outputs[0].cached_tokens == 0
    assert steps[-1].ended == pytest.approx(1.033)


def test_loads_come_one_after_the_other_and_nobody_else_waits_for_them() -> None:
    sim = with_tier(tier(), max_batched_tokens=64)
    sim.submit(request("a", 33, 1), 1.0)
    sim.submit(request("other", 4, 1, salt=9), 1.0)
    steps = run(sim, until=1.0055)
    sim.submit(request("late", 4, 1, salt=8), 1.0055)
    steps += run(sim)
    assert first(steps, "other") == pytest.approx(1.004)
    assert first(steps, "late") == pytest.approx(1.0095)
    assert first(steps, "a") == pytest.approx(1.011)
    sim = with_tier(tier())
    assert sim.reset(0.5) is not None
    sim.submit(request("a", 33, 1), 1.0)
    sim.submit(request("b", 33, 1, salt=1), 1.0)
    steps = run(sim)
    assert first(steps, "a") == pytest.approx(1.011)
    assert first(steps, "b") == pytest.approx(1.021)


def test_an_abort_ends_a_load() -> None:
    sim = with_tier(tier())
    sim.submit(request("again", 33, 1), 1.0)
    sim.advance(1.0)
    sim.check_invariants()
    sim.abort("again", 1.001)
    steps = run(sim)
    assert steps[0].outputs[0].end is SimEnd.ABORT
    assert steps[0].ended == pytest.approx(1.001)
    assert sim.load() == SimLoad(0, 0, 0, 0)


def test_the_tier_keeps_what_was_used_last_and_tells_what_changed() -> None:
    lower = tier(4)
    a, b = [BlockKey(i) for i in (1, 2, 3)], [BlockKey(i) for i in (4, 5)]
    lower.save(a)
    lower.save(b)
    assert lower.match(a) == 2, "the tail leaves first"
    assert lower.take_news() == [CopiesAdded((1, 2, 3)), CopiesAdded((4, 5)), CopiesDropped((3,))]
    lower.save(a[:1])
    assert lower.take_news() == []
    lower.save([BlockKey(9)])
    assert lower.take_news()[-1] == CopiesDropped((2,))
    with pytest.raises(ValueError, match="at least one"):
        tier(0)
