"""Our tokenizer on a folder against transformers' AutoTokenizer on the same folder."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from services.gateway.adapters.tokenizer import LONG_TEXT_CHARS, Tokenizer
from tests.contract import tokenizer_models as kinds
from tests.models import default_cache_dir, tiny_model

FOLDERS: dict[str, Callable[[Path], Path]] = {
    "smollm2": lambda _: kinds.smollm2(default_cache_dir()),
    "tiny": lambda _: tiny_model(default_cache_dir()),
    "byte_level": kinds.byte_level,
    "byte_level_add_bos": lambda p: kinds.byte_level(p, add_bos_token=True, add_eos_token=True),
    "byte_level_new_token": lambda p: kinds.byte_level(
        p,
        pad_token="<|pad|>",
        added_tokens_decoder={
            "601": {"content": "<call>", "special": False, "normalized": False},
        },
    ),
    "sentencepiece": kinds.sentencepiece,
    "sentencepiece_no_bos": lambda p: kinds.sentencepiece(p, add_bos_token=False),
    # Classes that build a tokenizer by rules of their own, whatever tokenizer.json says: what
    # save_pretrained makes of them is again a whole tokenizer.json.
    "sentencepiece_llama_class": lambda p: _saved(
        kinds.sentencepiece(p, tokenizer_class="LlamaTokenizerFast", legacy=False)
    ),
    "byte_level_gpt2_class": lambda p: _saved(kinds.byte_level(p, tokenizer_class="GPT2Tokenizer")),
    "metaspace": kinds.metaspace,
    "wordpiece": kinds.wordpiece,
}


def _saved(folder: Path) -> Path:
    AutoTokenizer.from_pretrained(str(folder)).save_pretrained(str(folder / "saved"))
    return folder / "saved"


@pytest.fixture(scope="module", params=FOLDERS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = FOLDERS[request.param](tmp_path_factory.mktemp("tok") / request.param)
    ours = Tokenizer.load(folder)
    yield ours, AutoTokenizer.from_pretrained(str(folder))
    ours.close()


@pytest.mark.parametrize("text", kinds.HARD_TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_encodes_alike(both, text: str, special: bool) -> None:
    ours, theirs = both
    assert ours.encode(text, add_special_tokens=special) == theirs.encode(
        text, add_special_tokens=special
    )


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text(max_size=60))
def test_encodes_any_text_alike(both, text: str) -> None:
    ours, theirs = both
    assert ours.encode(text) == theirs.encode(text)


def test_knows_the_same_special_tokens(both) -> None:
    ours, theirs = both
    assert {i for i in range(len(theirs)) if ours.is_special(i)} == set(theirs.all_special_ids) | {
        i for i, t in theirs.added_tokens_decoder.items() if t.special
    }
    assert ours.vocab_size == len(theirs)
    for name, value in ours.special_tokens.items():
        assert theirs.special_tokens_map[name] == value


@pytest.mark.parametrize("skip", [True, False])
def test_decodes_alike(both, skip: bool) -> None:
    ours, theirs = both
    for text in kinds.HARD_TEXTS:
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=st.one_of(
        st.text(max_size=200),
        st.binary(max_size=200).map(lambda b: b.decode("latin-1")),
        st.sampled_from(["a", " ", "\n", "=", "\U0001f600", "the capital of "]).map(
            lambda t: t * 300
        ),
    )
)
def test_a_text_has_no_fewer_tokens_than_told(both, text: str) -> None:
    ours, _ = both
    assert ours.least_tokens(text) <= len(ours.encode(text, add_special_tokens=False))


def test_which_lengths_are_bounded(both, request: pytest.FixtureRequest) -> None:
    ours, _ = both
    bounded = "metaspace" not in request.node.name and "wordpiece" not in request.node.name
    assert (ours.least_tokens("a" * 10**6) > 0) == bounded


async def test_many_short_texts_let_others_run(both) -> None:
    ours, _ = both
    ran = []
    asyncio.get_running_loop().call_soon(ran.append, True)
    for _ in range(20):
        await ours.encode_async("a" * (LONG_TEXT_CHARS // 10))
    assert ran


async def test_long_texts_are_encoded_off_the_loop_alike(both) -> None:
    ours, _ = both
    text = "The capital of Japan is Tokyo. " * (LONG_TEXT_CHARS // 20)
    assert await ours.encode_async(text) == ours.encode(text)


def test_token_bytes_are_the_tokens_text(both) -> None:
    ours, theirs = both
    if not ours.byte_exact:
        pytest.skip("text is not the tokens' own bytes")
    for token_id in range(0, len(theirs), 7):
        raw = ours.token_bytes(token_id)
        assert raw is not None
        # Behind an ordinary token: a first one may lose its blank.
        (anchor,) = ours.encode("a", add_special_tokens=False)[-1:]
        text = ours.decode([anchor, token_id], skip_special_tokens=False)
        assert raw.decode(errors="replace") == text[len(ours.decode([anchor])) :]
    assert ours.token_bytes(len(theirs) + 5) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_bad_file_is_named(tmp_path: Path, name: str) -> None:
    folder = kinds.byte_level(tmp_path)
    (folder / name).write_text("{")
    with pytest.raises(ValueError, match=name):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer.json is missing"):
        Tokenizer.load(folder)
