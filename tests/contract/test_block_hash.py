"""Our block hash against vLLM's own, by its hash functions (no engine is started)."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.common.blocks import ROOT_HASH, HashedAdapter, block_hashes

# Importing vLLM warns of what its own dependencies deprecate.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "unit/common/golden/block_hashes.json").read_text()
)

Hasher = Callable[[Sequence[int], int, HashedAdapter | None, str], list[bytes]]


@pytest.fixture(scope="module")
def vllm_hashes() -> Hasher:
    """vLLM's hashes of a request as its scheduler computes them."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    kv_cache_utils.init_none_hash(sha256_cbor)
    assert kv_cache_utils.NONE_HASH == ROOT_HASH

    def hashes(
        token_ids: Sequence[int], size: int, adapter: HashedAdapter | None, salt: str
    ) -> list[bytes]:
        request = Request(
            request_id="r",
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=LoRARequest(adapter.name, 1, adapter.path) if adapter else None,
            cache_salt=salt or None,
            block_hasher=kv_cache_utils.get_request_block_hasher(size, sha256_cbor),
        )
        return [bytes(h) for h in request.block_hashes]

    return hashes


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_golden_vectors_are_vllms(vllm_hashes: Hasher, vector: dict[str, Any]) -> None:
    adapter = HashedAdapter(**vector["adapter"]) if vector["adapter"] else None
    theirs = vllm_hashes(vector["token_ids"], vector["block_size"], adapter, vector["cache_salt"])
    assert [h.hex() for h in theirs] == vector["block_hashes"]


@pytest.mark.parametrize("adapter", [None, HashedAdapter("name/with slash", "/a path/ü")])
@pytest.mark.parametrize("salt", ["", "s", "Straße"])
@pytest.mark.parametrize("size", [1, 16, 32, 128])
def test_long_prompts_agree(
    vllm_hashes: Hasher, adapter: HashedAdapter | None, salt: str, size: int
) -> None:
    tokens = [(i * 7919) % 151_936 for i in range(1_000)]
    assert vllm_hashes(tokens, size, adapter, salt) == block_hashes(
        tokens, size, adapter=adapter, cache_salt=salt
    )
