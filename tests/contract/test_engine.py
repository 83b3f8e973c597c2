"""The engine port, held by the fake, the simulator, and real vLLM in both of its modes.

The real engines run a tiny context-sensitive model in float32, in which greedy text is exact.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save_file

from services.common.blocks import HashedAdapter, block_hashes, block_keys
from services.common.cards import Adapter
from services.common.errors import InvalidRequest
from services.worker.config import WorkerSettings
from services.worker.core.blocks import BlockMirror
from services.worker.core.model import FinishReason, Sampling
from services.worker.engines.port import Engine, EngineDead, EngineLoad, EngineRequest, Output, Step
from services.worker.engines.sim.engine import SimEngine
from services.worker.engines.sim.folder import simulated_model
from services.worker.engines.vllm import open_vllm
from tests.fakes.engine import open_fake_engine
from tests.models import EOS_ID, HEAD_DIM, HEADS, HIDDEN, VOCAB_SIZE, default_cache_dir, tiny_model

BLOCK = 32
TOTAL_BLOCKS = 95
BLOCK_BYTES = 131_072
MAX_LEN = 1024
GREEDY = Sampling(max_tokens=8, temperature=0.0)
REAL = (
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Harness:
    """An engine with a listener that keeps what it hears."""

    def __init__(self, engine: Engine, name: str, adapter: Adapter) -> None:
        self.engine = engine
        self.name = name
        self.adapter = adapter
        self.mirror = BlockMirror()
        self.outputs: dict[str, list[Output]] = {}
        self.steps: list[Step] = []
        self.load: EngineLoad | None = None
        self.dead: EngineDead | None = None
        self._news = asyncio.Event()
        self._ids = itertools.count(1)
        engine.listen(self._on_step, self._on_death)

    def _on_step(self, step: Step) -> None:
        self.steps.append(step)
        self.mirror.apply(step.blocks)
        for output in step.outputs:
            self.outputs.setdefault(output.id, []).append(output)
        for load in step.loads:
            self.load = load
        self._news.set()

    def _on_death(self, dead: EngineDead) -> None:
        self.dead = dead
        self._news.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(60):
            while not condition():
                assert self.dead is None, self.dead
                self._news.clear()
                await self._news.wait()

    def submit(self, prompt, sampling=GREEDY, **more) -> str:
        id = f"r{next(self._ids)}"
        self.engine.submit(EngineRequest(id, tuple(prompt), sampling, **more))
        return id

    def finished(self, id: str) -> bool:
        return any(o.finish for o in self.outputs.get(id, ()))

    async def run(self, prompt, sampling=GREEDY, **more) -> list[Output]:
        id = self.submit(prompt, sampling, **more)
        await self.until(lambda: self.finished(id))
        return self.outputs[id]

    async def idle(self) -> None:
        def quiet() -> bool:
            load = self.load
            return load is not None and (load.running, load.waiting, load.used_blocks) == (0, 0, 0)

        await self.until(quiet)

    async def settle(self) -> None:
        """Waits until all block events of the past are in the mirror.

        They may come by another way than outputs, but in order: so a new block comes last.
        """
        await self.idle()
        marker = prompt(BLOCK + 1, 10_000 + next(self._ids))
        await self.run(marker, replace(GREEDY, max_tokens=1))
        (key,) = block_keys(marker, BLOCK)
        await self.until(lambda: key in self.keys())
        await self.idle()

    async def reset(self) -> None:
        await self.idle()
        assert await self.engine.reset_cache()

    def keys(self) -> set[int]:
        return {key for tier in self.mirror.blocks() for key in tier.keys}


def tokens(outputs: list[Output]) -> list[int]:
    return [t for o in outputs for t in o.token_ids]


def cached(outputs: list[Output]) -> int | None:
    return next((o.cached_tokens for o in outputs if o.cached_tokens is not None), None)


def prompt(length: int, salt: int = 0) -> list[int]:
    rng = np.random.default_rng(salt)
    return [int(t) for t in rng.integers(3, VOCAB_SIZE, length)]


def write_adapter(folder: Path) -> Path:
    """A LoRA adapter that changes what the tiny model says."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 64,
        "target_modules": ["q_proj"],
        "bias": "none",
        "base_model_name_or_path": "tiny",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(5)
    tensors = {}
    for layer in range(2):
        base = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{base}.lora_A.weight"] = rng.normal(0, 1, (8, HIDDEN)).astype(np.float32)
        tensors[f"{base}.lora_B.weight"] = rng.normal(0, 1, (HEADS * HEAD_DIM, 8)).astype(
            np.float32
        )
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def simulated(adapter: Path, links: Path) -> SimEngine:
    settings = WorkerSettings(
        model=str(tiny_model(default_cache_dir())),
        max_model_len=MAX_LEN,
        engine="sim",
        adapters={"twist": str(adapter)},
        adapter_root=str(links),
        sim_speedup=10,
        sim_output_tokens=0,
        engine_args={
            "block_size": BLOCK,
            "num_gpu_blocks_override": TOTAL_BLOCKS,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 32,
        },
    )
    model = simulated_model(settings)
    return SimEngine(model.profile, model.config, model.vocabulary, speedup=settings.sim_speedup)


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    # vLLM freezes its view of the environment when an engine starts in this process: that one last.
    params=[
        "fake",
        "sim",
        pytest.param("async", marks=REAL),
        pytest.param("inprocess", marks=REAL),
    ],
)
async def engine(request, tmp_path_factory) -> AsyncIterator[Harness]:
    folder = write_adapter(tmp_path_factory.mktemp("adapter"))
    async with AsyncExitStack() as stack:
        if request.param == "fake":
            made = await stack.enter_async_context(
                open_fake_engine(
                    total_blocks=TOTAL_BLOCKS,
                    max_model_len=MAX_LEN,
                    adapters=[Adapter("twist", str(folder))],
                )
            )
        elif request.param == "sim":
            made = simulated(folder, tmp_path_factory.mktemp("links"))
            stack.callback(made.close)
        else:
            saved = dict(os.environ)
            stack.callback(lambda: (os.environ.clear(), os.environ.update(saved)))
            settings = WorkerSettings(
                model=str(tiny_model(default_cache_dir())),
                dtype="float32",
                max_model_len=MAX_LEN,
                engine_mode=request.param,
                adapters={"twist": str(folder)},
                adapter_root=str(tmp_path_factory.mktemp("links")),
                engine_args={"kv_cache_memory_bytes": BLOCK_BYTES * (TOTAL_BLOCKS + 1)},
            )
            made = await stack.enter_async_context(open_vllm(settings))
        yield Harness(made, request.param, made.profile.adapters[0])


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def clean(engine: Harness) -> AsyncIterator[None]:
    """Each test starts on an idle engine without blocks, and leaves an idle one."""
    if engine.load is not None:
        await engine.reset()
    engine.steps.clear()
    yield
    if engine.outputs and engine.dead is None:
        await engine.idle()
    engine.outputs.clear()


async def test_profile_tells_what_it_serves(engine: Harness) -> None:
    profile = engine.engine.profile
    assert profile.block_size == BLOCK
    assert profile.total_blocks == TOTAL_BLOCKS
    assert profile.max_model_len == MAX_LEN
    assert profile.vocab_size == VOCAB_SIZE
    assert profile.eos_token_ids == (EOS_ID,)


async def test_its_own_hash_function_is_ours(engine: Harness) -> None:
    vector = engine.engine.profile.hash_vector
    expected = block_hashes(vector.token_ids, BLOCK, cache_salt=vector.cache_salt)
    assert len(expected) == 2
    assert list(vector.block_hashes) == expected


async def test_tokens_come_in_order_with_one_end(engine: Harness) -> None:
    outputs = await engine.run(prompt(50))
    assert len(tokens(outputs)) == 8
    assert [o.finish for o in outputs] == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]
    numbers = [s.number for s in engine.steps]
    assert numbers == sorted(numbers)
    assert engine.engine.progress >= 8


async def test_greedy_text_depends_on_the_prompt_alone(engine: Harness) -> None:
    alone = tokens(await engine.run(prompt(70)))
    ids = [engine.submit(prompt(70 - i)) for i in range(4)]
    await engine.until(lambda: all(engine.finished(id) for id in ids))
    assert tokens(engine.outputs[ids[0]]) == alone
    assert tokens(engine.outputs[ids[1]]) != alone


async def test_cached_tokens_are_what_was_not_computed(engine: Harness) -> None:
    long = prompt(5 * BLOCK + 1)
    assert cached(await engine.run(long)) == 0
    assert cached(await engine.run(long)) == 5 * BLOCK
    # Of a prompt of full blocks the last one is computed: its last token's logits are needed.
    assert cached(await engine.run(long[: 3 * BLOCK])) == 2 * BLOCK
    assert cached(await engine.run([*long[: 2 * BLOCK], 7, *long[2 * BLOCK :]])) == 2 * BLOCK


async def test_a_cached_prefix_does_not_change_the_text(engine: Harness) -> None:
    fresh = tokens(await engine.run(prompt(200)))
    again = await engine.run(prompt(200))
    assert cached(again) == 192
    assert tokens(again) == fresh


async def test_salts_and_adapters_never_share_blocks(engine: Harness) -> None:
    p = prompt(100)
    base = await engine.run(p)
    salted = await engine.run(p, cache_salt="tenant a")
    other = await engine.run(p, cache_salt="tenant b")
    twisted = await engine.run(p, adapter="twist")
    assert [cached(o) for o in (base, salted, other, twisted)] == [0, 0, 0, 0]
    assert tokens(base) == tokens(salted) == tokens(other)
    assert tokens(twisted) != tokens(base)
    assert cached(await engine.run(p, cache_salt="tenant a")) == 96
    assert cached(await engine.run(p, adapter="twist")) == 96
    adapter = HashedAdapter("twist", engine.adapter.path)
    await engine.settle()
    for more in ({}, {"cache_salt": "tenant a"}, {"adapter": adapter}):
        assert set(block_keys(p, BLOCK, **more)) <= engine.keys()


async def test_prior_output_goes_on_as_if_nothing_had_happened(engine: Harness) -> None:
    p = prompt(90)
    whole = tokens(await engine.run(p, replace(GREEDY, max_tokens=24)))
    for cut in (1, 7, 20):
        await engine.reset()
        rest = await engine.run([*p, *whole[:cut]], replace(GREEDY, max_tokens=24 - cut))
        assert tokens(rest) == whole[cut:]


async def test_abort_while_decoding_frees_everything(engine: Harness) -> None:
    id = engine.submit(prompt(64), replace(GREEDY, max_tokens=900, ignore_eos=True))
    await engine.until(lambda: len(tokens(engine.outputs.get(id, []))) >= 3)
    engine.engine.abort(id)
    await engine.until(lambda: engine.finished(id))
    assert engine.outputs[id][-1].finish is FinishReason.ABORT
    await engine.idle()
    count = len(engine.outputs[id])
    await engine.run(prompt(40))
    assert len(engine.outputs[id]) == count, "news after the end"


async def test_abort_in_prefill_and_in_the_queue(engine: Harness) -> None:
    ids = [engine.submit(prompt(1000, i), replace(GREEDY, max_tokens=20)) for i in range(6)]
    for id in ids:
        engine.engine.abort(id)
    await engine.until(lambda: all(engine.finished(id) for id in ids))
    ends = [[o.finish for o in engine.outputs[id] if o.finish] for id in ids]
    assert ends == [[FinishReason.ABORT]] * 6
    await engine.idle()


async def test_abort_of_what_is_not_there_is_nothing(engine: Harness) -> None:
    outputs = await engine.run(prompt(40))
    engine.engine.abort("never")
    engine.engine.abort(next(iter(engine.outputs)))
    assert tokens(await engine.run(prompt(40))) == tokens(outputs)
    assert all(sum(o.finish is not None for o in n) == 1 for n in engine.outputs.values())


async def test_bias_and_allowed_ids_rule_what_comes(engine: Harness) -> None:
    forced = await engine.run(prompt(40), replace(GREEDY, logit_bias={77: 100.0}))
    assert tokens(forced) == [77] * 8
    allowed = (101, 202, 303)
    few = await engine.run(prompt(40), replace(GREEDY, allowed_token_ids=allowed))
    assert set(tokens(few)) <= set(allowed)


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("logit_bias", replace(GREEDY, logit_bias={999_999: 5.0})),
        ("allowed_token_ids", replace(GREEDY, allowed_token_ids=(VOCAB_SIZE,))),
        ("stop_token_ids", replace(GREEDY, stop_token_ids=(1 << 31,))),
    ],
)
async def test_ids_out_of_the_vocabulary_are_refused(engine: Harness, field, sampling) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(prompt(40), sampling)
    assert caught.value.field == field
    assert len(tokens(await engine.run(prompt(40)))) == 8


async def test_a_prompt_out_of_the_vocabulary_is_refused(engine: Harness) -> None:
    with pytest.raises(InvalidRequest):
        engine.submit([VOCAB_SIZE])
    assert len(tokens(await engine.run(prompt(40)))) == 8


async def test_stops(engine: Harness) -> None:
    plain = tokens(await engine.run(prompt(40)))
    third = plain[2]
    at = plain.index(third)
    stopped = await engine.run(prompt(40), replace(GREEDY, stop_token_ids=(third,)))
    assert tokens(stopped) == plain[: at + 1]
    assert (stopped[-1].finish, stopped[-1].stop_token_id) == (FinishReason.STOP, third)


async def test_end_token_ends_unless_ignored_or_too_early(engine: Harness) -> None:
    to_end = replace(GREEDY, logit_bias={EOS_ID: 100.0})
    ended = await engine.run(prompt(40), to_end)
    assert tokens(ended) == [EOS_ID]
    assert (ended[-1].finish, ended[-1].stop_token_id) == (FinishReason.STOP, None)
    ignored = await engine.run(prompt(40), replace(to_end, ignore_eos=True))
    assert tokens(ignored) == [EOS_ID] * 8
    late = tokens(await engine.run(prompt(40), replace(to_end, min_tokens=3)))
    assert late[-1] == EOS_ID
    assert late.index(EOS_ID) == 3


async def test_the_context_ends_a_generation(engine: Harness) -> None:
    outputs = await engine.run(prompt(MAX_LEN - 5), replace(GREEDY, max_tokens=50))
    assert len(tokens(outputs)) == 5
    assert outputs[-1].finish is FinishReason.LENGTH
    with pytest.raises(InvalidRequest):
        engine.submit(prompt(MAX_LEN))


async def test_seeds_repeat_and_seedless_ones_vary(engine: Harness) -> None:
    sampled = Sampling(max_tokens=12, temperature=1.0, seed=-1)
    one = tokens(await engine.run(prompt(40), sampled))
    assert tokens(await engine.run(prompt(40), sampled)) == one
    assert tokens(await engine.run(prompt(40), replace(sampled, seed=2))) != one
    free = replace(sampled, seed=None)
    texts = {tuple(tokens(await engine.run(prompt(40), free))) for _ in range(3)}
    assert len(texts) == 3


async def test_logprobs_have_token_rank_and_alternatives(engine: Harness) -> None:
    # Two widths in one batch: each request gets its own.
    narrow = engine.submit(prompt(40), replace(GREEDY, logprobs=0))
    wide = engine.submit(prompt(40), replace(GREEDY, logprobs=5))
    none = engine.submit(prompt(40))
    await engine.until(lambda: all(engine.finished(id) for id in (narrow, wide, none)))
    for id, width in ((narrow, 0), (wide, 5)):
        positions = [p for o in engine.outputs[id] for p in o.logprobs]
        assert [p.token_id for p in positions] == tokens(engine.outputs[id])
        for p in positions:
            assert p.rank == 1
            assert len(p.top_token_ids) == len(p.top_logprobs) == width
            assert list(p.top_logprobs) == sorted(p.top_logprobs, reverse=True)
            assert p.logprob < 0
            if width:
                assert (p.top_token_ids[0], p.top_logprobs[0]) == (p.token_id, p.logprob)
    assert all(not o.logprobs for o in engine.outputs[none])


async def test_prompt_logprobs_come_once_for_all_but_the_first(engine: Harness) -> None:
    p = prompt(300)
    await engine.run(p)
    outputs = await engine.run(p, replace(GREEDY, prompt_logprobs=2))
    assert cached(outputs) == 0, "a prompt that is scored is computed"
    assert [t.token_id for t in outputs[0].prompt_logprobs] == p[1:]
    assert {len(t.top_token_ids) for t in outputs[0].prompt_logprobs} == {2}
    assert all(not o.prompt_logprobs for o in outputs[1:])


async def test_penalties_and_truncation_are_passed_on(engine: Harness) -> None:
    if engine.name in ("fake", "sim"):
        pytest.skip("it has no distribution to shape")
    loop = replace(GREEDY, max_tokens=40, allowed_token_ids=(101, 202, 303, 404))
    plain = tokens(await engine.run(prompt(40), loop))
    for penalty in ("presence_penalty", "frequency_penalty"):
        changed = tokens(await engine.run(prompt(40), replace(loop, **{penalty: 2.0})))
        assert changed != plain, penalty
    greedy = tokens(await engine.run(prompt(40)))
    # It counts the prompt's tokens too.
    primed = [*prompt(40), *greedy]
    free = tokens(await engine.run(primed))
    penalised = tokens(await engine.run(primed, replace(GREEDY, repetition_penalty=5.0)))
    assert not set(penalised) & set(greedy)
    assert penalised != free
    hot = Sampling(max_tokens=8, temperature=2.0)
    for narrowing in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert tokens(await engine.run(prompt(40), replace(hot, **narrowing))) == greedy, narrowing


async def test_priority_goes_first(engine: Harness) -> None:
    blockers = [
        engine.submit(prompt(900, 50 + i), replace(GREEDY, max_tokens=60)) for i in range(3)
    ]
    late = engine.submit(prompt(600, 1), priority=5)
    early = engine.submit(prompt(600, 2), priority=-5)
    await engine.until(lambda: engine.finished(early) and engine.finished(late))
    firsts = [o.id for s in engine.steps for o in s.outputs if o.cached_tokens is not None]
    assert firsts.index(early) < firsts.index(late)
    await engine.until(lambda: all(engine.finished(id) for id in blockers))


async def test_mirror_foretells_hits_through_duplicates_and_evictions(engine: Harness) -> None:
    # Equal prompts at once make several copies of a block; far more prompts than fit evict.
    prompts = [prompt(200, 100 + i) for i in range(24)]
    ids = [engine.submit(p) for p in (*prompts, *prompts[:8], *prompts[:8])]
    await engine.until(lambda: all(engine.finished(id) for id in ids))
    await engine.settle()
    assert engine.mirror.unknown_drops == 0
    engine.mirror.check_invariants()
    assert 0 < len(engine.keys()) <= TOTAL_BLOCKS
    hits = 0
    for p in prompts[::-1]:
        known = engine.keys()
        keys = block_keys(p, BLOCK)[: (len(p) - 1) // BLOCK]
        expected = BLOCK * next((i for i, k in enumerate(keys) if k not in known), len(keys))
        assert cached(await engine.run(p, replace(GREEDY, max_tokens=1))) == expected
        await engine.settle()
        hits += expected
    assert hits > 0
    if engine.name == "inprocess":
        assert engine.keys() == await engine.engine.call(pool_keys)
    elif engine.name in ("fake", "sim"):
        assert engine.keys() == engine.engine.held


def pool_keys(core) -> set[int]:
    """What vLLM's own pool would hit, read from its table of cached blocks."""
    cache = core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    # A key is the block's hash and four bytes of group number.
    return {int.from_bytes(key[:-4][-8:], "big") for key in cache}


async def test_reset_forgets_all_and_says_so_first(engine: Harness) -> None:
    await engine.run(prompt(100))
    await engine.settle()
    assert engine.keys()
    assert await engine.engine.reset_cache()
    assert not engine.keys()
    assert cached(await engine.run(prompt(100))) == 0


async def test_reset_is_refused_while_requests_run(engine: Harness) -> None:
    id = engine.submit(prompt(64), replace(GREEDY, max_tokens=900, ignore_eos=True))
    await engine.until(lambda: bool(engine.outputs.get(id)))
    held = engine.keys()
    assert not await engine.engine.reset_cache()
    assert held <= engine.keys()
    engine.engine.abort(id)
    await engine.until(lambda: engine.finished(id))


@pytest.mark.parametrize(
    "extreme",
    [
        {"top_k": 2**32 - 1},
        {"temperature": 1e-9},
        {"temperature": 2.0},
        {"max_tokens": 2**32 - 1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": 1e30},
        {"logit_bias": {i: -100.0 for i in range(VOCAB_SIZE)}},
        {"stop_token_ids": tuple(range(VOCAB_SIZE)), "min_tokens": 3},
        {"top_p": 1e-300, "min_p": 1.0},
    ],
    ids=lambda extreme: "-".join(f"{k}={v}"[:32] for k, v in extreme.items()),
)
async def test_extremes_hurt_nobody(engine: Harness, extreme: dict[str, object]) -> None:
    usual = tokens(await engine.run(prompt(40)))
    sampling = replace(Sampling(max_tokens=4), **extreme)
    id = engine.submit(prompt(40), sampling, priority=-(2**31))
    other = engine.submit(prompt(40), priority=2**31 - 1)
    await engine.until(lambda: engine.finished(other) and bool(engine.outputs.get(id)))
    engine.engine.abort(id)
    await engine.until(lambda: engine.finished(id))
    assert tokens(engine.outputs[other]) == usual
    assert all(0 <= t < VOCAB_SIZE for t in tokens(engine.outputs[id]))


async def test_a_failed_engine_says_so(engine: Harness) -> None:
    """The last test: it leaves a dead engine."""
    if engine.name == "async":
        pytest.skip("tests/integration/worker/test_process.py kills the engine's process")

    def fail(core) -> None:
        def step() -> None:
            raise RuntimeError("a test broke this step")

        core.step_fn = step

    id = engine.submit(prompt(40), replace(GREEDY, max_tokens=900, ignore_eos=True))
    await engine.until(lambda: bool(engine.outputs.get(id)))
    if engine.name in ("fake", "sim"):
        engine.engine.die("a test broke this step")
    else:
        await engine.engine.call(fail)
    async with asyncio.timeout(10):
        while engine.dead is None:
            engine._news.clear()
            await engine._news.wait()
    assert "a test broke this step" in str(engine.dead)
    for what in (lambda: engine.submit(prompt(5)), engine.engine.reset_cache):
        with pytest.raises(EngineDead):
            made = what()
            assert await made
    late: list[EngineDead] = []
    engine.engine.listen(lambda step: None, late.append)
    assert late == [engine.dead]
