"""Model cards: checked, compared, fetched; what does not fit is not served."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.cards import HashVector, ModelFile
from tests.fakes.token_worker import TokenWorker, make_card
from tests.support.client import completion_body

PROMPT = list(range(100, 140))


async def test_other_hashes_are_refused(rig: Any, tiny_model_path: Path) -> None:
    card = make_card(tiny_model_path)
    assert card.hash_vector is not None
    wrong = HashVector(card.hash_vector.token_ids, "", card.hash_vector.block_hashes)
    worker = TokenWorker("w0", tiny_model_path, card=replace(card, hash_vector=wrong))
    async with rig(workers=[worker], wait=False) as r:
        answer = await r.client.post("/v1/completions", json=completion_body("tiny", PROMPT))
        assert answer.status_code == 404
        assert await r.metric("model_cards_refused_total", reason="card") == 1.0
        assert (await r.client.get("/ready")).status_code == 503


async def test_workers_that_disagree(rig: Any, tiny_model_path: Path) -> None:
    """The second card has another end token: the router may choose that worker, we don't."""
    good = TokenWorker("w1", tiny_model_path)
    other = TokenWorker("w0", tiny_model_path, card=make_card(tiny_model_path, eos_token_ids=(7,)))
    async with rig(workers=[good, other]) as r:
        answer = await r.client.post("/v1/completions", json=completion_body("tiny", PROMPT))
        assert answer.status_code == 200
        assert r.router.requests[0].excluded_workers == ["w0"]
        assert await r.metric("model_cards_refused_total", reason="disagree") == 1.0
        # When the last of the first kind is gone, the other kind is the model.
        r.discovery.drop(good.instance)
        await good.kill()
        async with asyncio.timeout(10):
            while not other.requests:
                await r.client.post("/v1/completions", json=completion_body("tiny", PROMPT))
        answer = await r.client.post("/v1/completions", json=completion_body("tiny", PROMPT))
        assert answer.status_code == 200, answer.text
        assert "w0" not in r.router.requests[-1].excluded_workers


async def test_files_that_are_not_what_the_card_says(rig: Any, tiny_model_path: Path) -> None:
    card = make_card(tiny_model_path)
    files = tuple(replace(f, sha256=b"x" * 32) for f in card.files)
    worker = TokenWorker("w0", tiny_model_path, card=replace(card, files=files))
    async with rig(workers=[worker], wait=False) as r:
        answer = await r.client.post("/v1/completions", json=completion_body("tiny", PROMPT))
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert "not ready" in answer.json()["error"]["message"]


async def test_names_that_leave_the_directory(rig: Any, tiny_model_path: Path) -> None:
    card = make_card(tiny_model_path)
    files = (*card.files, ModelFile("../evil", b"x" * 32, 3))
    worker = TokenWorker("w0", tiny_model_path, card=replace(card, files=files))
    async with rig(workers=[worker], wait=False) as r:
        assert await r.metric("model_cards_refused_total", reason="card") == 1.0


async def test_files_are_fetched_once(rig: Any, tiny_model_path: Path, tmp_path: Path) -> None:
    """A second gateway with the same directory needs no file, and mends a damaged one."""
    cache = tmp_path / "kept"
    async with rig(model_cache_dir=str(cache)):
        pass
    (folder,) = cache.iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    async with rig(model_cache_dir=str(cache)):
        assert (folder / "tokenizer.json").stat().st_mtime_ns == before
    (folder / "tokenizer.json").write_text("{}")
    async with rig(model_cache_dir=str(cache)) as r:
        answer = await r.client.post("/v1/completions", json=completion_body("tiny", PROMPT))
        assert answer.status_code == 200
    assert (folder / "tokenizer.json").read_bytes() == (
        tiny_model_path / "tokenizer.json"
    ).read_bytes()


async def test_models(rig: Any, tiny_model_path: Path) -> None:
    """Ids with slashes, raw and escaped."""
    worker = TokenWorker("w0", tiny_model_path, card=make_card(tiny_model_path, "org/tiny"))
    async with rig(workers=[worker]) as r:
        listed = (await r.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [m["id"] for m in listed["data"]] == ["org/tiny"]
        for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny"):
            model = (await r.client.get(path)).json()
            assert model == listed["data"][0]
            assert (model["object"], model["created"]) == ("model", 1_700_000_000)
        missing = await r.client.get("/v1/models/no/such")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"


async def test_health(rig: Any) -> None:
    async with rig(workers=2) as r:
        answer = await r.client.get("/health")
        assert answer.status_code == 200
        body = answer.json()
        assert body["status"] == "healthy"
        workers = [i for i in body["instances"] if i["component"] == "worker"]
        assert [w["id"] for w in workers] == ["w0", "w1"]
        assert workers[0]["endpoint"] == r.worker.instance.address
        assert workers[0]["model"] == "tiny" and workers[0]["connected"]
        assert int(workers[0]["incarnation"], 16) == r.worker.incarnation
        assert [i["id"] for i in body["instances"] if i["component"] == "router"] == ["r0"]
        assert "/v1/chat/completions" in body["endpoints"]
