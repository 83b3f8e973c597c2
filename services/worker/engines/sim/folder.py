"""What a simulated engine serves: figures of its machine, and a model's folder without weights.

The folder gives tokenizer, template and context length, so that gateways find all that they need.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.blocks import block_hashes
from services.common.cards import HashVector
from services.common.settings import SettingsError
from services.common.telemetry.logging import get_logger
from services.worker.adapters.files import DigestCache, link_adapters
from services.worker.config import WorkerSettings
from services.worker.engines.port import EngineProfile
from services.worker.engines.sim.core.model import SimConfig
from services.worker.engines.sim.core.published import capacity_tokens, published
from services.worker.engines.sim.core.timing import TimingProfile, profile_from
from services.worker.engines.sim.core.tokens import Vocabulary
from services.worker.errors import EngineStartError

TRANSFER = "sim"
"""How KV is handed over; no real engine's way, so that the two are never paired."""
NAME = "simulator"
"""The first word of its card's engine: whoever shows a card shows it."""
VERSION = "1"
DEFAULT_CAPACITY_TOKENS = 262_144
"""Tokens of KV when a profile from a file does not say."""
MAX_LOGPROBS = 20
_SALT = "forebay"
_ARGS = {
    "block_size": 16,
    "num_gpu_blocks_override": 0,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
}
"""vLLM's arguments that it knows, with their defaults; 0 blocks: as many as the machine holds."""
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """All that simulated engines of one process have in common."""

    profile: EngineProfile
    config: SimConfig
    vocabulary: Vocabulary


def simulated_model(settings: WorkerSettings) -> SimulatedModel:
    """Reads the model's folder and the timing profile (blocking).

    Raises SettingsError for a setting that a simulator can't follow, EngineStartError for a folder
    that holds no model.
    """
    for name in ("kvbm", "kv_cache_gb"):
        if getattr(settings, name):
            raise SettingsError(
                f"{name} is set, but a simulated engine has no memory of its own"
                " (its size in blocks: --engine-args '{\"num_gpu_blocks_override\": 1000}')"
            )
    timing, tokens = load_timing(settings.sim_profile)
    args = _arguments(settings.engine_args)
    size = args["block_size"]
    blocks = args["num_gpu_blocks_override"] or max(1, tokens // size)
    if settings.sim_fill_blocks > blocks:
        raise SettingsError(
            f"sim_fill_blocks is {settings.sim_fill_blocks}, but an engine has {blocks} blocks"
        )
    folder = Path(settings.model)
    text = _json(folder / "config.json")
    if text is None:
        raise EngineStartError(
            f"--model {settings.model}: there is no readable config.json in it; a simulated engine"
            " needs a model's folder (its weights may be missing)"
        )
    vocab_size = _number(text, "vocab_size")
    if vocab_size is None:
        raise EngineStartError(f"--model {settings.model}: its config.json has no vocab_size")
    longest = settings.max_model_len or _number(text, "max_position_embeddings") or blocks * size
    max_model_len = min(longest, blocks * size)
    if settings.max_model_len and max_model_len < settings.max_model_len:
        raise SettingsError(
            f"max_model_len is {settings.max_model_len}; {blocks} blocks of {size} tokens hold"
            f" {blocks * size}"
        )
    eos = _eos(text, _json(folder / "generation_config.json") or {})
    example = tuple((i * 7919 + 1) % vocab_size for i in range(2 * size))
    try:
        config = SimConfig(
            timing,
            capacity_blocks=blocks,
            block_size=size,
            max_batched_tokens=args["max_num_batched_tokens"],
            max_running=args["max_num_seqs"],
            max_model_len=max_model_len,
            coalesce_s=settings.sim_coalesce_ms / 1000 * settings.sim_speedup,
        )
    except ValueError as exc:
        raise SettingsError(f"engine_args: {exc}") from exc
    adapters = link_adapters(settings.adapters, settings.adapter_root, DigestCache())
    profile = EngineProfile(
        engine=f"{NAME} {VERSION} ({timing.name})",
        model_dir=folder.resolve(),
        block_size=size,
        total_blocks=blocks,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos,
        max_logprobs=MAX_LOGPROBS,
        hash_vector=HashVector(
            example, _SALT, tuple(block_hashes(example, size, cache_salt=_SALT))
        ),
        identity={
            "engine": NAME,
            "version": VERSION,
            "block_size": str(size),
            "model": folder.name,
        },
        adapters=tuple(adapters),
        simulated=True,
        transfer=TRANSFER,
    )
    special = _special(_json(folder / "tokenizer.json") or {}) | set(eos)
    if len(special) >= vocab_size:
        raise EngineStartError(f"--model {settings.model}: all its tokens are special ones")
    vocabulary = Vocabulary(vocab_size, eos, frozenset(special), settings.sim_output_tokens)
    return SimulatedModel(profile, config, vocabulary)


def load_timing(name: str) -> tuple[TimingProfile, int]:
    """A timing profile by name or from a TOML file, and the tokens of KV that its machine holds.

    The file has the fields of TimingProfile and, if it likes, `capacity_tokens`. Raises
    SettingsError that names the file and the field.
    """
    if not name.endswith(".toml"):
        try:
            return published(name), capacity_tokens(name)
        except ValueError as exc:
            raise SettingsError(f"sim_profile: {exc}, and files that end in .toml") from exc
    try:
        with open(name, "rb") as file:
            table = tomllib.load(file)
        tokens = table.pop("capacity_tokens", DEFAULT_CAPACITY_TOKENS)
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"capacity_tokens is {tokens!r}; it must be a whole number from 1 on")
        return profile_from(table), tokens
    except (OSError, ValueError) as exc:
        raise SettingsError(f"sim_profile {name!r} is no timing profile: {exc}") from exc


def _arguments(given: Mapping[str, Any]) -> dict[str, int]:
    args = dict(_ARGS)
    for name, value in given.items():
        if name not in _ARGS:
            known = ", ".join(_ARGS)
            raise SettingsError(f"engine_args: a simulated engine knows {known}, not {name!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingsError(
                f"engine_args: {name} is {value!r}; it must be a whole number from 1 on"
            )
        args[name] = value
    return args


def _json(file: Path) -> dict[str, Any] | None:
    try:
        read = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None


def _number(config: Mapping[str, Any], name: str) -> int | None:
    """A whole number of the configuration, or of its part about text."""
    for table in (config, config.get("text_config")):
        if isinstance(table, dict) and isinstance(value := table.get(name), int) and value > 0:
            return value
    return None


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for table in (generation, config):
        stated = table.get("eos_token_id")
        ids += [stated] if isinstance(stated, int) else [i for i in stated or () if i is not None]
    return tuple(dict.fromkeys(ids))


def _special(tokenizer: Mapping[str, Any]) -> set[int]:
    added = tokenizer.get("added_tokens") or ()
    return {t["id"] for t in added if isinstance(t, dict) and isinstance(t.get("id"), int)}
