"""Incremental detokenizing against the library's own decoding of all tokens at once."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.adapters.token_bytes import plan_token_bytes
from services.gateway.adapters.tokenizer import Tokenizer
from services.gateway.core.detokenize import REPLACEMENT, Detokenizer
from tests.contract import tokenizer_models as kinds
from tests.models import default_cache_dir, tiny_model

FOLDERS: dict[str, Callable[[Path], Path]] = {
    "smollm2": lambda _: kinds.smollm2(default_cache_dir()),
    "tiny": lambda _: tiny_model(default_cache_dir()),
    "byte_level": kinds.byte_level,
    "sentencepiece": kinds.sentencepiece,
    "metaspace": kinds.metaspace,
    "wordpiece": kinds.wordpiece,
}
BYTE_LEVEL = ("smollm2", "tiny", "byte_level")
SLOW = settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Tokenizer] = {}

    def get(name: str) -> Tokenizer:
        if name not in made:
            made[name] = Tokenizer.load(FOLDERS[name](tmp_path_factory.mktemp(name)))
        return made[name]

    yield get
    for tokenizer in made.values():
        tokenizer.close()


def detokenize(tokenizer: Tokenizer, ids: list[int], **options) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    pieces = [piece for token_id in ids for piece in detokenizer.push([token_id])]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("name", BYTE_LEVEL)
@pytest.mark.parametrize("skip", [True, False])
@SLOW
@given(seed=st.integers(0, 2**32), length=st.integers(0, 80), mostly_bytes=st.booleans())
def test_case_37_hot_samples_read_as_decoded_at_once(
    load, name: str, skip: bool, seed: int, length: int, mostly_bytes: bool
) -> None:
    tokenizer = load(name)
    rng = random.Random(seed)
    # Hot sampling is noise; single bytes, which end inside characters, are drawn more often.
    top = 300 if mostly_bytes else tokenizer.vocab_size
    ids = [rng.randrange(top) for _ in range(length)]
    pieces = detokenize(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", FOLDERS)
@SLOW
@given(text=st.text(max_size=40))
def test_real_text_reads_as_decoded_at_once_and_in_whole_characters(
    load, name: str, text: str
) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    pieces = detokenize(tokenizer, ids)
    assert "".join(pieces) == whole
    if REPLACEMENT not in whole:  # a vocabulary may lack bytes
        assert not any(piece.endswith(REPLACEMENT) for piece in pieces)


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_case_37_a_trailing_half_is_flushed_once(load, name: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode("\U0001f9ff", add_special_tokens=False)
    assert len(ids) > 1, "want a character of several tokens"
    *pieces, last = detokenize(tokenizer, ids[:-1])
    assert pieces == [""] * len(pieces)
    assert last == REPLACEMENT
    assert tokenizer.decode(ids[:-1]) == REPLACEMENT
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(ids[:-1])
    assert detokenizer.inside_character
    detokenizer.flush()
    assert detokenizer.flush() == ""


def test_sentencepiece_bytes_that_are_no_text_spoil_only_themselves(load) -> None:
    tokenizer = load("sentencepiece")
    good = [tokenizer._backend.token_to_id(f"<0x{b:02X}>") for b in "é".encode()]
    (bad,) = (tokenizer._backend.token_to_id("<0xFF>"),)
    # The library gives up the whole run of byte tokens; when the first is out, that is too late.
    assert tokenizer.decode([*good, bad]) == REPLACEMENT * 3
    assert detokenize(tokenizer, [*good, bad]) == ["", "é", REPLACEMENT, ""]


def test_sentencepiece_keeps_the_first_blank_after_a_prompt(load) -> None:
    tokenizer = load("sentencepiece")
    ids = tokenizer.encode("Paris", add_special_tokens=False)
    prompt = tokenizer.encode("The capital of France is")
    assert "".join(detokenize(tokenizer, ids, prompt_ids=prompt)) == " Paris"
    assert tokenizer.decode(prompt + ids) == "The capital of France is Paris"
    # After nothing but a special token the blank is the encoder's own.
    assert "".join(detokenize(tokenizer, ids, prompt_ids=prompt[:1])) == "Paris"


@pytest.mark.parametrize("name", ["wordpiece"])
def test_the_windowed_way_reads_on_from_the_prompt(load, name: str) -> None:
    tokenizer = load(name)
    prompt = tokenizer.encode("The capital of Japan is", add_special_tokens=False)
    rest = tokenizer.encode("Tokyo , and that of France", add_special_tokens=False)
    text = "".join(detokenize(tokenizer, rest, prompt_ids=prompt))
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + rest)


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_beyond_the_vocabulary_have_no_text(load, name: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode("a", add_special_tokens=False)
    strange = [tokenizer.vocab_size + 3]
    assert "".join(detokenize(tokenizer, ids + strange + ids)) == tokenizer.decode(ids + ids)


@pytest.mark.parametrize("name", FOLDERS)
def test_which_tokenizers_have_bytes(load, name: str) -> None:
    assert load(name).byte_exact == (name != "wordpiece")


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        tokenizers.decoders.BPEDecoder(),
        tokenizers.decoders.Sequence(
            [
                tokenizers.decoders.Replace("x", " "),
                tokenizers.decoders.ByteFallback(),
                tokenizers.decoders.Fuse(),
            ]
        ),
        tokenizers.decoders.Sequence(
            [
                tokenizers.decoders.Replace("\u2581", " "),
                tokenizers.decoders.ByteFallback(),
                tokenizers.decoders.Fuse(),
                tokenizers.decoders.Strip(" ", 2, 1),
            ]
        ),
    ],
)
def test_unknown_decoders_go_the_windowed_way(decoder) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    if decoder is not None:
        tokenizer.decoder = decoder
    assert plan_token_bytes(json.loads(tokenizer.to_str())["decoder"]) is None
