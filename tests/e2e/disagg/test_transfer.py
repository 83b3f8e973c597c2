"""KV from engine to engine: exact, checked, ended in time; nothing held afterwards."""

import asyncio
import time

import grpc
import pytest
from forebay.worker.v1 import worker_pb2 as pb

from tests.support.pairs import BLOCK, Pairs, prompt
from tests.support.polling import until

P, D = "worker-p", "worker-d"


async def test_every_remainder_of_a_block_gives_the_same_tokens(pairs: Pairs) -> None:
    prompts = [prompt(n, 3 * BLOCK + n) for n in range(BLOCK)]
    whole = [await pairs.ask(D, tokens) for tokens in prompts]
    await pairs.forget(D)
    lanes = asyncio.Semaphore(8)

    async def one(tokens: tuple[int, ...]) -> tuple[object, ...]:
        async with lanes:
            first, second = await pairs.apart(P, D, tokens)
        assert second.error == ""
        assert first.cached == 0
        assert second.transferred == len(tokens) - 1
        return second.tokens

    apart = await asyncio.gather(*(one(tokens) for tokens in prompts))
    assert apart == [told.tokens for told in whole]


async def test_what_the_decode_side_has_does_not_travel(pairs: Pairs) -> None:
    tokens = prompt(100, 10 * BLOCK + 7)
    whole = await pairs.ask(D, tokens[: 6 * BLOCK])
    assert whole.cached == 0
    _, second = await pairs.apart(P, D, tokens)
    assert second.cached == len(tokens) - 1
    assert second.transferred == len(tokens) - 1 - 6 * BLOCK
    await pairs.forget(D)
    assert (await pairs.ask(D, tokens)).tokens == second.tokens


async def test_a_handle_of_another_prompt_is_of_no_use(pairs: Pairs) -> None:
    mine, other = prompt(200, 200), prompt(201, 200)
    handle = (await pairs.ask(P, other, prefill_only=True)).handle
    assert handle is not None
    before = await pairs.transfers(D, "refused")
    told = await pairs.ask(D, mine, transfer=handle)
    assert told.error == ""
    assert (told.cached, told.transferred) == (0, 0)
    assert await pairs.transfers(D, "refused") == before + 1
    await pairs.forget(D)
    assert (await pairs.ask(D, mine)).tokens == told.tokens


@pytest.mark.parametrize("field", ["namespace", "way", "engine_params"])
async def test_a_handle_that_is_not_ours_is_of_no_use(pairs: Pairs, field: str) -> None:
    tokens = prompt(300, 150)
    handle = (await pairs.ask(P, tokens, prefill_only=True)).handle
    assert handle is not None
    wrong = {"namespace": b"\x01" * 32, "way": "smoke", "engine_params": b"\x81"}[field]
    setattr(handle, field, wrong)
    told = await pairs.ask(D, tokens, transfer=handle)
    assert (told.error, told.transferred) == ("", 0)
    whole = await pairs.ask(P, tokens)
    assert told.tokens == whole.tokens


async def test_bytes_that_changed_under_way_are_computed(pairs: Pairs) -> None:
    """The sums in the handle are not those of the blocks: as after a lease that ran out."""
    import msgspec

    tokens = prompt(400, 5 * BLOCK + 3)
    whole = await pairs.ask(P, tokens)
    handle = (await pairs.ask(P, tokens, prefill_only=True)).handle
    assert handle is not None
    opaque = msgspec.msgpack.decode(handle.engine_params)
    opaque["params"]["forebay_transfer"]["sums"][2] ^= 1
    handle.engine_params = msgspec.msgpack.encode(opaque)
    before = await pairs.transfers(D, "failed")
    told = await pairs.ask(D, tokens, transfer=handle)
    assert told.error == ""
    assert told.tokens == whole.tokens
    assert (told.cached, told.transferred) == (0, 0)
    assert await pairs.transfers(D, "failed") == before + 1


async def test_nobody_takes_it_and_the_lease_ends(pairs: Pairs) -> None:
    assert (await pairs.ask(P, prompt(500, 300), prefill_only=True)).handle is not None
    assert await pairs.held(P) == 1
    began = time.monotonic()

    async def gone() -> bool:
        return await pairs.held(P) == 0

    await until(gone, within_s=10, what="the end of the lease")
    assert time.monotonic() - began > 3


async def test_a_release_ends_it_at_once(pairs: Pairs) -> None:
    from tests.support.client import WorkerClient

    async with WorkerClient(pairs.address(P)) as client:
        call = client.stub.Session()
        await call.write(pb.SessionRequest(open=pb.SessionOpen(gateway_id="g")))
        request = pb.GenerateRequest(
            request_id="one",
            prompt_token_ids=prompt(501, 300),
            sampling=pb.SamplingParams(max_tokens=1),
            prefill_only=True,
        )
        await call.write(pb.SessionRequest(generate=request))
        done = False
        while not done:
            frame = await call.read()
            done = any(delta.finish_reason for delta in frame.deltas)
        assert await pairs.held(P) == 1
        await call.write(pb.SessionRequest(release=pb.ReleaseTransfer(request_id="one")))

        async def gone() -> bool:
            return await pairs.held(P) == 0

        await until(gone, within_s=2, what="the release")
        await call.done_writing()


async def test_the_prefill_worker_is_gone_before_the_read(pairs: Pairs) -> None:
    tokens = prompt(600, 9 * BLOCK + 1)
    whole = await pairs.ask(D, tokens)
    await pairs.forget(D)
    handle = (await pairs.ask(P, tokens, prefill_only=True)).handle
    pairs.cluster[P].kill()
    began = time.monotonic()
    told = await pairs.ask(D, tokens, transfer=handle)
    assert told.error == ""
    assert told.tokens == whole.tokens
    assert told.transferred == 0
    assert time.monotonic() - began < 10


async def test_the_prefill_worker_starts_anew_in_its_place(pairs: Pairs) -> None:
    port = pairs.address(P).rpartition(":")[2]
    first, second = await pairs.apart(P, D, prompt(700, 200))
    assert second.transferred > 0
    pairs.cluster[P].kill()
    pairs.cluster[P].argv += ["--port", port]
    pairs.cluster[P].start()
    await pairs.cluster[P].until_ready()
    tokens = prompt(701, 200)
    _, told = await pairs.apart(P, D, tokens)
    assert told.transferred == len(tokens) - 1
    old = await pairs.ask(D, prompt(700, 200), transfer=first.handle)
    assert old.error == ""


async def test_the_prefill_worker_is_stopped_and_goes_on(pairs: Pairs) -> None:
    """Past the read's deadline its agent goes, the prompt is computed; later all is as before."""
    await pairs.apart(P, D, prompt(800, 100))
    tokens = prompt(801, 30 * BLOCK + 9)
    whole = await pairs.ask(D, tokens)
    await pairs.forget(D)
    handle = (await pairs.ask(P, tokens, prefill_only=True)).handle
    pairs.cluster[P].freeze()
    try:
        told = await pairs.ask(D, tokens, transfer=handle)
    finally:
        pairs.cluster[P].thaw()
    assert told.error == ""
    assert told.tokens == whole.tokens
    tokens = prompt(802, 200)
    _, after = await pairs.apart(P, D, tokens)
    assert after.error == ""
    await pairs.forget(D)
    assert (await pairs.ask(D, tokens)).tokens == after.tokens


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(pairs: Pairs) -> None:
    from tests.support.client import WorkerClient

    tokens = prompt(900, 40 * BLOCK)
    handle = (await pairs.ask(P, tokens, prefill_only=True)).handle
    async with WorkerClient(pairs.address(D)) as client:
        request = pb.GenerateRequest(
            prompt_token_ids=tokens,
            sampling=pb.SamplingParams(max_tokens=500, ignore_eos=True),
            transfer=handle,
        )
        call = client.stub.Generate(request, timeout=30)
        reading = asyncio.ensure_future(call.read())
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await reading
    await pairs.at_rest(P, D)


async def test_a_role_changes_at_run_time(pairs: Pairs) -> None:
    from forebay.common.v1 import common_pb2

    from tests.support.client import WorkerClient

    async with WorkerClient(pairs.address(D)) as client:
        answer = await client.stub.SetRole(pb.SetRoleRequest(role=common_pb2.ROLE_BOTH), timeout=5)
        assert answer.previous == common_pb2.ROLE_DECODE
        answer = await client.stub.SetRole(
            pb.SetRoleRequest(role=common_pb2.ROLE_DECODE), timeout=5
        )
        assert answer.previous == common_pb2.ROLE_BOTH
        with pytest.raises(grpc.aio.AioRpcError, match="role"):
            await client.stub.SetRole(pb.SetRoleRequest(), timeout=5)
