"""Both legs on real workers with simulated engines: the whole way but for the router's decision."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.cards import Instance, Role
from services.common.events.model import (
    BlocksStored,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    TransferEnded,
)
from tests.fakes.router import FakeRouter, pair
from tests.support.client import PROMISE_S, completion_body, send
from tests.support.polling import until
from tests.support.simulated import group, heard, snapshot

PROMPT = [3 + i % 2000 for i in range(1000)]


@asynccontextmanager
async def cluster(rig: Any, folder: Path, **settings: Any) -> AsyncIterator[Any]:
    """A gateway, a simulated worker of each role, and a router that pairs them."""
    for role in ("p", "d"):
        (folder / role).mkdir()
    async with (
        group(folder / "p", 1, id="p", role="prefill", **settings) as prefills,
        group(folder / "d", 1, id="d", role="decode", **settings) as decodes,
    ):
        prefill, decode = (g.discovery.registered_instances[-1] for g in (prefills, decodes))
        router = FakeRouter("r0", lambda q: pair(q, [prefill], [decode], 0, 0))
        async with rig(workers=[], router=router) as r:
            for instance in (prefill, decode):
                r.discovery.put(instance)
            ready = lambda a: a.status_code == 200  # noqa: E731
            await until(lambda: r.client.get("/ready"), ready, within_s=20, what="ready worker")
            yield r, prefill, decode


async def idle(*workers: Instance) -> None:
    """Nothing runs on them, and nothing is held."""
    for worker in workers:

        async def quiet(worker: Instance = worker) -> bool:
            shot = await snapshot(worker)
            return not shot.requests and not (shot.load and shot.load.held_transfers)

        await until(quiet, within_s=10, what="idle worker")


async def test_from_one_to_the_other(rig: Any, tmp_path: Path) -> None:
    async with cluster(rig, tmp_path) as (r, prefill, decode):
        assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
        assert prefill.transfer == decode.transfer == "sim"
        body = completion_body("tiny", PROMPT, max_tokens=8, ignore_eos=True)
        async with heard(prefill) as (first, _), heard(decode) as (second, _):
            answer = await r.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-forebay-prefill-worker"] == prefill.id
            assert answer.headers["x-forebay-worker"] == decode.id
            assert await r.metric("transfers_total", result="used") == 1
            assert await r.metric("transferred_tokens_total", model="tiny") == 999

            def told(batches: list[Any], kind: type) -> list[Any]:
                return [e for b in batches for e in b.events if isinstance(e, kind)]

            async def over() -> bool:
                return bool(told(first, RequestFinished) and told(second, RequestFinished))

            await until(over, within_s=10, what="both ends")
        (leg,), (request,) = told(first, RequestAdmitted), told(second, RequestAdmitted)
        assert leg.prefill_only and (leg.transfer_tokens, leg.max_new_tokens) == (0, 1)
        assert not request.prefill_only and request.transfer_tokens == 1000
        assert request.max_new_tokens == 8
        assert told(first, RequestFirstToken)[0].cached_tokens == 0
        (token,) = told(second, RequestFirstToken)
        assert (token.cached_tokens, token.transferred_tokens) == (999, 999)
        (ended,) = told(second, TransferEnded)
        assert (ended.attempt_id, ended.source) == (request.attempt_id, prefill.id)
        assert ended.tokens == 999 and ended.bytes > 0 and ended.seconds > 0
        assert {k for e in told(second, BlocksStored) for k in e.keys} >= set(leg.keys)

        again = await r.client.post("/v1/completions", json=body)
        cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == 992
        whole = await r.client.post(
            "/v1/completions", json=body, headers={"x-forebay-worker": decode.id}
        )
        assert "x-forebay-prefill-worker" not in whole.headers
        text = answer.json()["choices"][0]["text"]
        assert text == again.json()["choices"][0]["text"] == whole.json()["choices"][0]["text"]
        await idle(prefill, decode)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_client_leaves(rig: Any, tmp_path: Path, leg: str) -> None:
    """In steps that take their time: the worker drops it with the step that runs."""
    profile = tmp_path / "slow.toml"
    profile.write_text(
        'name = "slow"\nsource = "made up"\ntoken_s = 0.0005\noverhead_s = 0.02\n'
        "transfer_latency_s = 0.05\n"
    )
    settings = {"sim_profile": str(profile), "sim_speedup": 1}
    if leg == "prefill":
        settings["engine_args"] = {"max_num_batched_tokens": 16}  # some hundred steps
    async with cluster(rig, tmp_path, **settings) as (r, prefill, decode):
        worker = {"prefill": prefill, "decode": decode}[leg]
        body = completion_body("tiny", PROMPT * 3, max_tokens=900, ignore_eos=True)
        _, writer = await send(r.port, body, "/v1/completions")

        async def begun() -> bool:
            return bool((await snapshot(worker)).requests)

        await until(begun, within_s=20, what=f"{leg} leg")
        writer.close()
        await writer.wait_closed()
        left = asyncio.get_running_loop().time()

        async def over() -> bool:
            return not (await snapshot(worker)).requests

        await until(over, within_s=10, what="end of the leg")
        # Promised of the abort; a step and two looks come on top.
        assert asyncio.get_running_loop().time() - left < PROMISE_S + 0.5
        await idle(prefill, decode)
        assert await r.metric("sequences_in_flight") == 0
