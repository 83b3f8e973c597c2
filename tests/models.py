"""A tiny random model for tests of exactness: real files, a real tokenizer, built in a second.

A plainly initialised random model repeats one token whatever it reads, and so hides a wrong or a
missing KV block. This one is context-sensitive: Qwen3's q/k norms make attention sharp, the head is
untied, and the weights are float32, so that greedy text is the same in every batch. Its tokenizer
is a byte-level BPE of 2,048 ids: random output is full of half characters, as detokenizers need.

Greedy output never holds an end token by chance (their logits are 0); `logit_bias` can force one.
"""

import hashlib
import json
import os
import pydoc_data.topics
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
MAX_MODEL_LEN = 8192
EOS_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", EOS_TOKEN)
"""Ids 0, 1, 2."""
EOS_ID = 2

HIDDEN = 256
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
FFN = 512
SHARPNESS = 2.0
"""Weight of the q and k norms: attention scores spread with its square."""
LOGIT_SCALE = 2.5
"""Spread of the logits: wide enough for clear greedy choices, narrow enough for varied samples."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- elif message['content'] -%}"
    "{%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}"
    "{%- endif -%}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "<call>{{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }}</call>"
    "{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def tiny_model(cache_dir: Path) -> Path:
    """The model's folder under `cache_dir`; built at the first call; many may ask at once."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    target = cache_dir / f"tiny-{digest}"
    if target.exists():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="tiny-", dir=cache_dir))
    try:
        _write_tokenizer(scratch)
        _write_configs(scratch)
        save_file(_weights(), scratch / "model.safetensors", metadata={"format": "pt"})
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError:
        if not target.exists():  # somebody else was quicker: theirs is as good
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def tiny_adapter(folder: Path, seed: int = 5) -> Path:
    """Writes a LoRA adapter into `folder` that changes what the tiny model says."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": 8,
        "lora_alpha": 64,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for part, shape in (("A", (8, HIDDEN)), ("B", (HEADS * HEAD_DIM, 8))):
            weights = rng.normal(0.0, 1.0, shape).astype(np.float32)
            tensors[f"{name}.lora_{part}.weight"] = weights
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def default_cache_dir() -> Path:
    """Where test models are kept between runs: FOREBAY_TEST_CACHE, or the user's cache."""
    home = os.environ.get("FOREBAY_TEST_CACHE")
    return Path(home) if home else Path.home() / ".cache" / "forebay-tests"


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # English prose that every Python carries; characters beyond ASCII stay single bytes on purpose.
    prose = (text for _, text in sorted(pydoc_data.topics.topics.items()))
    tokenizer.train_from_iterator(prose, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"trained {tokenizer.get_vocab_size()} ids, wanted {VOCAB_SIZE}")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_MODEL_LEN,
        "eos_token": EOS_TOKEN,
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _write_configs(folder: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID]}))


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(20240229)

    def random(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(0.0, scale / columns**0.5, (rows, columns)).astype(np.float32)

    def ones(size: int, value: float = 1.0) -> np.ndarray:
        return np.full(size, value, np.float32)

    tensors = {
        "model.embed_tokens.weight": random(VOCAB_SIZE, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": random(VOCAB_SIZE, HIDDEN, LOGIT_SCALE),
    }
    tensors["lm_head.weight"][: len(SPECIAL_TOKENS)] = 0.0
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        tensors[f"{layer}.input_layernorm.weight"] = ones(HIDDEN)
        tensors[f"{layer}.post_attention_layernorm.weight"] = ones(HIDDEN)
        tensors[f"{attention}.q_proj.weight"] = random(HEADS * HEAD_DIM, HIDDEN)
        tensors[f"{attention}.k_proj.weight"] = random(KV_HEADS * HEAD_DIM, HIDDEN)
        tensors[f"{attention}.v_proj.weight"] = random(KV_HEADS * HEAD_DIM, HIDDEN)
        # Attention must outweigh the last token's own embedding, or the text ignores its past.
        tensors[f"{attention}.o_proj.weight"] = random(HIDDEN, HEADS * HEAD_DIM, 3.0)
        tensors[f"{attention}.q_norm.weight"] = ones(HEAD_DIM, SHARPNESS)
        tensors[f"{attention}.k_norm.weight"] = ones(HEAD_DIM, SHARPNESS)
        tensors[f"{layer}.mlp.gate_proj.weight"] = random(FFN, HIDDEN)
        tensors[f"{layer}.mlp.up_proj.weight"] = random(FFN, HIDDEN)
        tensors[f"{layer}.mlp.down_proj.weight"] = random(HIDDEN, FFN)
    return tensors


if __name__ == "__main__":
    print(tiny_model(Path(sys.argv[1]) if len(sys.argv) > 1 else default_cache_dir()))
