"""The offload demonstration without a cluster: its workload, its published form, its picture."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from services.cli.adapters.http import ChatAnswer
from services.cli.adapters.kvbm import NodeStats, TierRow
from services.cli.demo.offload import Leg, Result
from services.cli.demo.offload_picture import draw
from services.cli.demo.samples import Sample, sample_of
from services.cli.demo.sizes import block_bytes, sizes_for
from services.cli.demo.visits import Visit, calibration_prompt, fitting_qps, plan_visits
from services.cli.errors import CliError, ModelError


def answer(ttft_s: float, *tokens: str) -> ChatAnswer:
    return ChatAnswer(
        text="".join(tokens), worker="w", prompt_tokens=1300, completion_tokens=len(tokens),
        cached_tokens=0, predicted_cached_tokens=0, ttft_s=ttft_s, tokens=tokens,
    )  # fmt: skip


def test_visits_return_with_the_same_beginning_at_the_set_rate() -> None:
    visits = plan_visits(6, 4, 0.5)
    assert [v.at_s for v in visits] == [2.0 * i for i in range(24)]
    assert sorted(v.user for v in visits) == sorted(list(range(6)) * 4)
    assert {v.user for v in visits[:6]} == set(range(6))  # everybody once before anyone returns
    by_user = {u: [v.prompt for v in visits if v.user == u] for u in range(6)}
    for prompts in by_user.values():
        assert len(set(prompts)) == 4  # another question each time
        shared = min(
            next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            for a, b in pairwise(prompts)
        )
        assert shared > 5000  # characters: more than a thousand tokens
    firsts = [prompts[0] for prompts in by_user.values()]
    assert len({p[:60] for p in firsts}) == 6  # no two people share even their first block
    assert plan_visits(6, 4, 0.5) == visits
    for wrong in ((1, 4, 0.5), (6, 1, 0.5), (6, 4, 0.0), (99, 4, 0.5)):
        with pytest.raises(ValueError):
            plan_visits(*wrong)


def test_the_rate_fits_the_machine() -> None:
    assert fitting_qps(2.0) == pytest.approx(0.3)
    assert (fitting_qps(0.01), fitting_qps(100.0)) == (2.0, 0.12)
    prompt = calibration_prompt()
    firsts = [v.prompt for v in plan_visits(11, 2, 0.5) if v.number == 0]
    assert all(p[:60] != prompt[:60] for p in firsts)
    assert abs(len(prompt) - len(firsts[0])) < 200


def test_caches_are_measured_in_documents(tiny_model_path: Path, tmp_path: Path) -> None:
    prompts = [v.prompt for v in plan_visits(5, 2, 0.5)]
    sizes = sizes_for(tiny_model_path, prompts)
    document = sizes.max_model_len // 32
    assert 2 * document < sizes.g1_blocks < 3 * document  # and one request of full length fits
    assert sizes.g2_blocks - 64 > sizes.g1_blocks
    assert sizes.g2_blocks - 64 < 5 * document < sizes.g3_blocks
    assert sizes.block_bytes == 2 * 4 * 2 * 64 * 32 * 4
    assert sizes.gib(1000) == pytest.approx(1010 * sizes.block_bytes / 2**30)
    assert (
        block_bytes({"num_attention_heads": 8, "hidden_size": 64, "num_hidden_layers": 3})
        == 2 * 8 * 8 * 3 * 4 * 32
    )
    with pytest.raises(ModelError, match="needs a model folder"):
        sizes_for(tmp_path, prompts)


def stats(**counters: float) -> NodeStats:
    tier = TierRow("g2", 7, 70, 100, "mmap", "ok", 0, "/a")
    return NodeStats("n", 1, (tier, replace(tier, tier="g3", blocks=9)), (), (), counters, 0)


def test_samples_tell_blocks_from_disk_apart_from_those_in_memory() -> None:
    seen = sample_of(
        1.5,
        {"forebay_worker_cached_blocks": 5.0},
        stats(
            offload_blocks_d2h=20, offload_blocks_h2d=12, onboard_blocks_h2d=11,
            onboard_blocks_d2d=4,
        ),
    )  # fmt: skip
    assert (seen.g1, seen.g2, seen.g3) == (5, 7, 9)
    assert seen.moved == (20, 12, 7, 4)
    assert sample_of(0, {}, stats()).moved == (0, 0, 0, 0)
    first = sample_of(0, {}, stats(offload_blocks_d2h=8, onboard_blocks_h2d=1))
    assert seen.since(first).moved == (12, 12, 6, 4) and seen.since(first).g2 == 7


def result(*tokens: str) -> Result:
    visits = (Visit(0.0, 0, 0, "p"), Visit(2.0, 0, 1, "p"), Visit(4.0, 1, 0, "q"))
    first = Sample(0.0, 1, 0, 0, 0, 0, 0, 0)
    last = Sample(6.0, 2, 3, 4, 30, 20, 10, 5)
    on = Leg(tuple(answer(s, "a", "b") for s in (1.0, 0.1, 0.2)), (first, last))
    off = Leg(tuple(answer(s, *tokens) for s in (1.0, 2.0, 3.12345)))
    return Result(visits, on, off, 32, 0.5)


def test_json_is_the_published_form() -> None:
    assert result("a", "b").to_json() == {
        "offload_g1_g2_blocks": 30,
        "offload_g2_g3_blocks": 20,
        "onboard_g2_g1_blocks": 10,
        "onboard_g3_g1_blocks": 5,
        "ttft_p50_s": {"off": 2.0, "on": 0.2},
        "tokens_equal": True,
    }
    assert not result("a", "c").tokens_equal
    assert not result().tokens_equal  # nothing to compare is not equal


def test_picture(tmp_path: Path) -> None:
    r = result("a")
    args = (r.on.samples, r.visits, r.on.ttft_s, r.off.ttft_s, 32, "m")
    draw(*args, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CliError, match="can't be written"):
        draw(*args, tmp_path / "absent" / "p.png")
