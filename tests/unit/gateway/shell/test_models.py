"""Who serves what: agreement, refusal, succession, adapters."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from services.common.blocks import block_hashes
from services.common.cards import Adapter, HashVector, Instance, InstanceKind, ModelCard
from services.gateway.adapters.cards import CardRefused, FilesUnavailable, check_card
from services.gateway.models import Models

TOKENS = tuple(range(64))
VECTOR = HashVector(TOKENS, "s", tuple(block_hashes(TOKENS, 32, cache_salt="s")))
CARD = ModelCard("m", b"n" * 32, 32, 4096, 1000, hash_vector=VECTOR)


def worker(name: str, card: ModelCard = CARD, incarnation: int = 1) -> Instance:
    return Instance(name, InstanceKind.WORKER, incarnation, f"{name}:1", card=card)


class Loader:
    """Loads at once, unless told to fail so many times."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls: list[str] = []

    async def __call__(self, address: str, card: ModelCard) -> Any:
        self.calls.append(address)
        if self.failures:
            raise self.failures.pop(0)
        return object()


def make(*failures: Exception) -> tuple[Models, Loader, list[str]]:
    loader, refused = Loader(*failures), []  # type: ignore[var-annotated]
    return Models(loader, refused.append), loader, refused


async def test_served_once_loaded() -> None:
    models, loader, _ = make()
    models.update(worker("a"))
    assert models.resolve("m") is None and models.loading("m") and not models.loading("x")
    models.update(worker("b"))
    await models.settled()
    served = models.resolve("m")
    assert served is not None and served.adapter is None and loader.calls == ["a:1"]
    assert [w.id for w in models.workers("m")] == ["a", "b"]
    assert models.resolve("x") is None


async def test_the_next_worker_is_asked() -> None:
    models, loader, _ = make(FilesUnavailable("away"))
    models.update(worker("a"))
    models.update(worker("b"))
    await models.settled()
    assert models.resolve("m") is not None and loader.calls == ["a:1", "b:1"]


async def test_another_life_keeps_the_tokenizer() -> None:
    models, loader, _ = make()
    models.update(worker("a"))
    await models.settled()
    before = models.resolve("m")
    models.update(worker("a", incarnation=2))
    after = models.resolve("m")
    assert before is not None and after is not None and before.tokenizer is after.tokenizer
    assert len(loader.calls) == 1 and models.workers("m")[0].incarnation == 2


async def test_another_life_with_another_verdict() -> None:
    models, _, refused = make()
    wrong = replace(CARD, hash_vector=replace(VECTOR, block_hashes=(b"x" * 32,)))
    models.update(worker("a", wrong))
    assert models.resolve("m") is None and refused == ["card"]
    # Restarted with the right settings, before its old record went.
    models.update(worker("a", incarnation=2))
    await models.settled()
    assert models.resolve("m") is not None and models.refused() == frozenset()
    models.update(worker("a", wrong, incarnation=3))
    assert models.resolve("m") is None and models.refused() == {"a"}


async def test_nobody_waits_for_another_model() -> None:
    never = asyncio.Event()

    async def load(address: str, card: ModelCard) -> Any:
        if card.model == "stuck":
            await never.wait()
        return object()

    models = Models(load, lambda reason: None)
    models.update(worker("a"))
    models.update(worker("b", replace(CARD, model="stuck")))
    async with asyncio.timeout(1):
        await models.settled("m")
    assert models.resolve("m") is not None and models.loading("stuck")
    models.close()


async def test_disagreement_and_succession() -> None:
    models, _, refused = make()
    other = replace(CARD, eos_token_ids=(5,))
    models.update(worker("a"))
    models.update(worker("b", other))
    await models.settled()
    assert models.refused() == {"b"} and refused == ["disagree"]
    assert [w.id for w in models.workers("m")] == ["a"]
    models.remove("a")
    await models.settled()
    served = models.resolve("m")
    assert served is not None and served.card == other and models.refused() == frozenset()


async def test_last_one_gone() -> None:
    models, _, _ = make()
    models.update(worker("a"))
    await models.settled()
    models.remove("a")
    assert models.resolve("m") is None and models.served() == [] and not models.loading("m")
    assert models.may_return("m") and models.may_return("x"), "without any model nobody is wrong"


async def test_a_name_that_was_served_lately_may_return() -> None:
    models, _, _ = make()
    models.update(worker("a", replace(CARD, adapters=(Adapter("org/lora", "/p"),))))
    models.update(worker("b", replace(CARD, model="other")))
    await models.settled()
    assert not models.may_return("x")
    models.remove("a")
    assert models.may_return("m") and models.may_return("org/lora")
    assert not models.may_return("x")
    models.close()


async def test_adapters() -> None:
    models, _, _ = make()
    with_adapter = replace(CARD, adapters=(Adapter("org/lora", "/p"),))
    models.update(worker("a", with_adapter))
    models.update(worker("b"))
    await models.settled()
    served = models.resolve("org/lora")
    assert served is not None and served.adapter is not None and served.card.model == "m"
    assert [w.id for w in models.workers("org/lora")] == ["a"]
    assert [s.name for s in models.served()] == ["m", "org/lora"]
    models.update(worker("a"))
    assert models.resolve("org/lora") is None


async def test_shortest_context_counts() -> None:
    models, _, _ = make()
    models.update(worker("a"))
    models.update(worker("b", replace(CARD, max_model_len=1024)))
    await models.settled()
    served = models.resolve("m")
    assert served is not None and served.card.max_model_len == 1024


async def test_files_that_are_no_tokenizer() -> None:
    models, _, refused = make(CardRefused("tokenizer.json is not JSON"))
    models.update(worker("a"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert refused == ["files"] and models.resolve("m") is None
    models.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ""}, "no model"),
        ({"block_size": 0}, "positive"),
        ({"hash_vector": None}, "no hash vector"),
        ({"hash_vector": replace(VECTOR, cache_salt="")}, "in another way"),
        ({"block_size": 16}, "in another way"),
    ],
)
def test_cards_that_are_refused(changes: dict[str, Any], words: str) -> None:
    assert words in check_card(replace(CARD, **changes))
    assert check_card(CARD) == ""
