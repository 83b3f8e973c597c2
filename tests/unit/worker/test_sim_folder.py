"""What a simulated engine serves, from settings and a folder without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.common.settings import SettingsError
from services.worker.adapters.files import DigestCache
from services.worker.cardset import build_cards
from services.worker.config import WorkerSettings
from services.worker.engines.sim.core.model import SimRequest
from services.worker.engines.sim.core.published import capacity_tokens
from services.worker.engines.sim.core.simulator import Simulator
from services.worker.engines.sim.folder import simulated_model
from services.worker.errors import EngineStartError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "tiny"
    model.mkdir()
    config = {"vocab_size": 100, "max_position_embeddings": 4096, "eos_token_id": 7}
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    (model / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 0}, {"id": 99}]}))
    return model


def settings(folder: Path, **more: object) -> WorkerSettings:
    return WorkerSettings(model=str(folder), engine="sim", **more)  # type: ignore[arg-type]


def test_a_card_says_that_it_is_a_simulator_and_needs_no_weights(folder: Path) -> None:
    model = simulated_model(settings(folder))
    card = build_cards("tiny", model.profile, DigestCache(folder / "digests")).card
    assert card.engine == "simulator 1 (h100/llama-3.1-8b)"
    assert (card.block_size, card.max_model_len, card.vocab_size) == (16, 4096, 100)
    assert card.total_blocks == capacity_tokens("h100/llama-3.1-8b") // 16
    assert card.eos_token_ids == (2, 7)
    assert {f.name for f in card.files} >= {"config.json", "tokenizer.json"}
    assert model.vocabulary.special == {0, 2, 7, 99}


def test_arguments_of_the_real_engine_size_it(folder: Path) -> None:
    args = {"block_size": 32, "num_gpu_blocks_override": 64, "max_num_seqs": 3}
    model = simulated_model(settings(folder, engine_args=args))
    assert (model.config.block_size, model.config.capacity_blocks) == (32, 64)
    assert (model.config.max_running, model.config.longest) == (3, 2048)


def test_a_profile_from_a_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nsource = "measured"\ntoken_s = 0.001\ncapacity_tokens = 3200\n')
    model = simulated_model(settings(folder, sim_profile=str(file)))
    assert model.config.profile.token_s == 0.001
    assert (model.config.capacity_blocks, model.profile.engine) == (200, "simulator 1 (mine)")


def test_the_measured_profile_gives_what_was_measured(folder: Path) -> None:
    file = Path(__file__).parents[3] / "benchmarks" / "simulator" / "smollm2-cpu.toml"
    args = {"block_size": 32, "max_num_batched_tokens": 256}
    made = settings(folder, sim_profile=str(file), engine_args=args)
    sim = Simulator(simulated_model(made).config)

    def run() -> tuple[float, float]:
        """Seconds to the first token, and decoded tokens a second after all first ones."""
        first = last = 0.0
        tokens = 0
        while (at := sim.next_time()) is not None:
            for step in sim.advance(at):
                if any(o.cached_tokens is not None for o in step.outputs):
                    first, tokens = step.ended, 0
                else:
                    tokens += sum(o.tokens for o in step.outputs)
                last = step.ended
        return first, tokens / (last - first) if tokens else 0.0

    sim.submit(SimRequest("long", 3322, 1), 0.0)
    assert run()[0] == pytest.approx(2.9, rel=0.05)
    sim.submit(SimRequest("one", 8, 100), 10.0)
    assert run()[1] == pytest.approx(25, rel=0.05)
    for i in range(8):
        sim.submit(SimRequest(f"r{i}", 8, 100), 100.0)
    assert run()[1] == pytest.approx(114, rel=0.05)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kvbm": "127.0.0.1:8300"}, "kvbm"),
        ({"kv_cache_gb": 1.0}, "kv_cache_gb"),
        ({"sim_profile": "h100"}, "sim_profile.*h100/llama"),
        ({"sim_profile": "/nowhere.toml"}, "sim_profile.*nowhere"),
        ({"sim_fill_blocks": 10**9}, "sim_fill_blocks"),
        ({"engine_args": {"seed": 1}}, "engine_args.*seed"),
        ({"engine_args": {"block_size": "x"}}, "block_size"),
        ({"max_model_len": 4096, "engine_args": {"num_gpu_blocks_override": 4}}, "max_model_len"),
    ],
)
def test_settings_it_can_not_follow_are_refused(
    folder: Path, more: dict[str, object], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        simulated_model(settings(folder, **more))


@pytest.mark.parametrize("text", ["", "[]", '{"hidden_size": 4}'])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineStartError, match=r"config\.json"):
        simulated_model(settings(tmp_path))
