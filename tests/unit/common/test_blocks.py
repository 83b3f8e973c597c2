"""Block hashes: golden vectors (tests/contract holds them to vLLM) and properties."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.blocks import (
    ROOT_HASH,
    HashedAdapter,
    block_hashes,
    block_key,
    block_keys,
)

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "golden" / "block_hashes.json").read_text()
)
TOKENS = st.lists(st.integers(0, 2**17), max_size=60)
SALTS = st.text(max_size=5)


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_golden_vectors(vector: dict[str, Any]) -> None:
    adapter = HashedAdapter(**vector["adapter"]) if vector["adapter"] else None
    found = block_hashes(
        vector["token_ids"],
        vector["block_size"],
        adapter=adapter,
        cache_salt=vector["cache_salt"],
    )
    assert [h.hex() for h in found] == vector["block_hashes"]
    keys = block_keys(
        vector["token_ids"],
        vector["block_size"],
        adapter=adapter,
        cache_salt=vector["cache_salt"],
    )
    assert keys == [int(h[-16:], 16) for h in vector["block_hashes"]]


def test_root_hash_is_fixed() -> None:
    assert ROOT_HASH.hex() == ("9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0")


def test_block_key_is_the_low_64_bits() -> None:
    assert block_key(bytes(range(32))) == 0x18191A1B1C1D1E1F


@given(TOKENS, st.integers(1, 8), SALTS)
def test_a_longer_prompt_keeps_the_hashes_of_its_prefix(
    tokens: list[int], size: int, salt: str
) -> None:
    whole = block_hashes(tokens, size, cache_salt=salt)
    assert len(whole) == len(tokens) // size
    for cut in range(len(tokens)):
        assert block_hashes(tokens[:cut], size, cache_salt=salt) == whole[: cut // size]


@given(TOKENS.filter(bool), SALTS, SALTS)
def test_different_salts_share_no_block(tokens: list[int], one: str, other: str) -> None:
    ours = block_hashes(tokens, 4, cache_salt=one)
    theirs = block_hashes(tokens, 4, cache_salt=other)
    assert (set(ours) & set(theirs) != set()) == (one == other and len(tokens) >= 4)


def test_adapter_name_and_path_both_count() -> None:
    variants = [
        None,
        HashedAdapter("a", "/x"),
        HashedAdapter("a", "/y"),
        HashedAdapter("b", "/x"),
    ]
    chains = [tuple(block_hashes(range(8), 4, adapter=a)) for a in variants]
    assert len({h for c in chains for h in c}) == 8


@pytest.mark.parametrize("size", [0, -1])
def test_block_size_must_be_positive(size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        block_hashes([1, 2], size)
