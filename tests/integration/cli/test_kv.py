"""`forebay kv` against a real daemon with real blocks; prompts are hashed by a worker's card."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forebay.common.v1 import common_pb2
from forebay.worker.v1 import worker_pb2 as pb
from typer.testing import CliRunner, Result

from services.cli.errors import CliError, StateError, UsageError
from services.cli.main import app
from services.common.blocks import block_hashes
from services.common.errors import ForebayError, NotFound
from services.common.events.model import Tier
from tests.fakes.token_worker import TokenWorker, make_card
from tests.support.kvbm import chain, daemon_process, engine

RAW = "a sentence about rivers, again and again and again " * 12


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a daemon with 32 MiB of G2 and 64 MiB of G3, an eighth of it for a namespace."""
    folder = tmp_path_factory.mktemp("kvbm")
    process = daemon_process(
        folder,
        *("--cpu-cache-gb", "0.03125", "--arena-share", "0.125", "--scrub-mb-s", "0"),
        *("--disk-cache-gb", "0.0625", "--disk-cache-dir", str(folder / "disk")),
        *("--disk-free-gb", "0"),
    )
    process.start()
    try:
        yield process.wait_ready(30).address
    finally:
        process.close()


async def forebay(*args: str) -> Result:
    """The command line in a thread, as a shell would run it but for the process."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["kv", *args])


async def kv(address: str, *args: str) -> Any:
    """The JSON answer of a command that must succeed."""
    done = await forebay(*args, "--address", address, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def namespace(name: str) -> bytes:
    return hashlib.sha256(f"test_kv/{name}".encode()).digest()


def tiers(counts: list[dict[str, Any]]) -> dict[str, int]:
    return {c["tier"]: c["blocks"] for c in counts if c["blocks"]}


async def test_stats_and_ls(daemon: str) -> None:
    space = namespace("stats")
    keys = chain("s", 8)
    async with engine(daemon, namespace=space, worker="w-stats") as e:
        await e.save(keys, tenant="acme")
        found = await kv(daemon, "stats")
        assert [t["tier"] for t in found["tiers"]][:2] == ["g2", "g3"]
        g2 = found["tiers"][0]
        assert g2["blocks"] >= 8 and 0 < g2["used_bytes"] <= g2["capacity_bytes"]
        (mine,) = [n for n in found["namespaces"] if n["namespace"] == space.hex()]
        assert mine["workers"] == ["w-stats"] and mine["block_size_tokens"] == 32
        assert tiers(mine["tiers"])["g2"] == 8
        assert found["counters"]["offload_blocks_d2h"] >= 8
        people = await forebay("stats", "--address", daemon)
        assert people.exit_code == 0 and space.hex()[:12] in people.stdout
        assert "G2" in people.stdout and "MiB" in people.stdout

    listed = await kv(daemon, "ls", "--namespace", space.hex()[:16], "--limit", "5")
    assert listed["total"] == 8 and len(listed["blocks"]) == 5
    assert {b["tenant"] for b in listed["blocks"]} == {"acme"}
    assert {b["key"] for b in listed["blocks"]} <= {k.hex() for k in keys}
    assert (await kv(daemon, "ls", "--tenant", "nobody"))["total"] == 0
    people = await forebay("ls", "--address", daemon, "--namespace", space.hex(), "--full")
    assert all(k.hex() in people.stdout for k in keys)


async def test_clear_counts_first_and_asks(daemon: str) -> None:
    space = namespace("clear")
    async with engine(daemon, namespace=space) as e:
        await e.save(chain("mine", 6), tenant="me")
        await e.save(chain("theirs", 4), tenant="them")
    select = ("--namespace", space.hex(), "--tenant", "me", "--tier", "g2")
    counted = await kv(daemon, "clear", *select, "--dry-run")
    assert counted["cleared"] is False and tiers(counted["tiers"]) == {"g2": 6}

    refused = await forebay("clear", *select, "--address", daemon)  # nobody at the terminal
    assert refused.exit_code != 0 and isinstance(refused.exception, UsageError)
    assert "--yes" in str(refused.exception)
    assert "would be forgotten: G2 6" in refused.output
    assert (await kv(daemon, "ls", "--namespace", space.hex()))["total"] >= 10

    done = await kv(daemon, "clear", *select, "--yes")
    assert done["cleared"] is True and tiers(done["tiers"]) == {"g2": 6}
    async with engine(daemon, namespace=space) as e:
        assert await e.load(chain("theirs", 4)) == 4
    for wrong in (
        (),
        ("--everything", "--tenant", "x"),
        ("--prefix", "12"),
        ("--namespace", "ffffffff"),
    ):
        bad = await forebay("clear", *wrong, "--address", daemon, "--yes")
        assert isinstance(bad.exception, UsageError), wrong


async def test_pin_by_hash_and_unpin(daemon: str) -> None:
    space = namespace("pin")
    keys = chain("p", 5)
    async with engine(daemon, namespace=space) as e:
        await e.save(keys)
    where = ("--namespace", space.hex())
    pinned = await kv(
        daemon, "pin", "--key", keys[3].hex(), "--ttl", "15m", "--owner", "me", *where
    )
    assert pinned == {"key": keys[3].hex(), "blocks": 4, "owner": "me", "ttl_s": 900.0}
    explained = await kv(daemon, "explain", "--keys", ",".join(k.hex() for k in keys), *where)
    assert [b["pins"] for b in explained["blocks"]] == [1, 1, 1, 1, 0]
    assert (await kv(daemon, "unpin", "--all", "--owner", "somebody", *where))["pins"] == 0
    assert (await kv(daemon, "unpin", keys[3].hex(), "--owner", "me", *where))["pins"] == 1
    unknown = await forebay("pin", "--key", "00" * 32, *where, "--address", daemon)
    assert isinstance(unknown.exception, ForebayError)
    for wrong in (("--ttl", "soon"), ("--ttl", "0s")):
        bad = await forebay("pin", "--key", keys[0].hex(), *where, *wrong, "--address", daemon)
        assert isinstance(bad.exception, UsageError)


async def test_scrub_finds_what_is_bad(daemon: str) -> None:
    """C14: right length, wrong bytes: told, with exit code 1, and gone."""
    space = namespace("scrub")
    keys = chain("v", 6)
    async with engine(daemon, namespace=space) as e:
        await e.save(keys)
        where = ("--namespace", space.hex())
        good = await kv(daemon, "scrub", *where, "--tier", "g2")
        assert good == {"scanned": 6, "total": 6, "corrupt": 0, "done": True}
        found = await e.lookup(keys)
        e.arena.shard(found.ready[2].slot.index, 0)[:4] = b"evil"
        await e.release(found, 6)
        bad = await forebay("scrub", *where, "--address", daemon, "--json", "--tier", "g2")
        assert bad.exit_code == 1 and json.loads(bad.stdout)["corrupt"] == 1
        people = await forebay("scrub", *where, "--address", daemon, "--tier", "g2")
        assert people.exit_code == 0 and "all good" in people.stdout
        assert await e.load(keys) == 2


class CardWorker(TokenWorker):
    """Tells its card, and which blocks its engine holds."""

    own: tuple[int, ...] = ()

    async def GetModelCard(self, request: Any, context: Any) -> pb.GetModelCardResponse:
        return pb.GetModelCardResponse(card=self.card.to_proto())

    async def Snapshot(self, request: Any, context: Any) -> pb.SnapshotResponse:
        held = pb.TierBlocks(tier=common_pb2.TIER_G1, block_hashes=self.own)
        return pb.SnapshotResponse(publisher=self.id, incarnation=1, blocks=[held])


async def test_explain_and_pin_a_prompt_as_the_gateway_would_hash_it(
    daemon: str, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path / "home"))
    space = namespace("explain")
    card = make_card(tiny_model_path, namespace=space)
    async with CardWorker("w0", tiny_model_path, card=card) as worker:
        at = ("--worker", worker.instance.address)
        unknown = await forebay("explain", RAW, "--raw", *at, "--address", daemon)
        assert isinstance(unknown.exception, NotFound)  # no engine has attached yet

        async with engine(daemon, namespace=space) as e:
            first = await kv(daemon, "explain", RAW, "--raw", *at)
            hashes = [bytes.fromhex(h) for h in first["hashes"]]
            assert first["tokens"] >= len(hashes) * 32 and len(hashes) >= 4
            assert {b["reason"] for b in first["blocks"]} == {"missing"}
            await e.save(hashes[:3])
            worker.own = tuple(int.from_bytes(h[-8:], "big") for h in hashes[:1])
            again = await kv(daemon, "explain", RAW, "--raw", *at, "--recompute-ms", "1000")
            assert [b["reason"] for b in again["blocks"]][:4] == [
                "in-engine", "ready", "ready", "missing",
            ]  # fmt: skip
            assert again["own_blocks"] == {worker.instance.address: 1}
            assert again["blocks"][1]["tiers"] == ["g2"] and again["blocks"][1]["load"]
            assert again["recompute_block_s"] == 1.0

            # The same hashes as the gateway's, whatever form the prompt has.
            file = tmp_path / "prompt.txt"
            file.write_text(RAW)
            assert (await kv(daemon, "explain", "--file", str(file), "--raw", *at))[
                "hashes"
            ] == first["hashes"]
            body = tmp_path / "body.json"
            body.write_text(json.dumps({"prompt": RAW, "max_tokens": 3}))
            assert (await kv(daemon, "explain", "--request", str(body), *at))["hashes"] == first[
                "hashes"
            ]
            tokens = list(range(3, 3 + 70))
            given = await kv(daemon, "explain", "--tokens", ",".join(map(str, tokens)), *at)
            assert given["hashes"] == [h.hex() for h in block_hashes(tokens, 32)]
            salted = await kv(daemon, "explain", RAW, "--raw", *at, "--tenant", "acme")
            assert not set(salted["hashes"]) & set(first["hashes"])
            chat = await kv(daemon, "explain", RAW, *at)
            assert chat["tokens"] > first["tokens"]  # the template's own

            people = await forebay("explain", RAW, "--raw", *at, "--address", daemon)
            assert people.exit_code == 0, people.exception
            assert "in-engine" in people.stdout and "G2" in people.stdout

            pinned = await kv(daemon, "pin", RAW, "--raw", *at, "--ttl", "1h")
            assert pinned["blocks"] == 3 and pinned["key"] == hashes[2].hex()
            nothing = await forebay("pin", "unlike " * 200, *at, "--address", daemon)
            assert isinstance(nothing.exception, UsageError)


async def test_mistakes_are_told(daemon: str, tmp_path: Path) -> None:
    nowhere = await forebay("stats", "--state-dir", str(tmp_path))
    assert isinstance(nowhere.exception, StateError) and "no kvbm runs" in str(nowhere.exception)
    for args in (
        ("explain",),
        ("explain", "text", "--tokens", "1"),
        ("explain", "--tokens", "one", "--worker", "127.0.0.1:1"),
        ("explain", "text", "--state-dir", str(tmp_path)),
        ("unpin",),
        ("explain", "--keys", "abc"),
    ):
        done = await forebay(*args, "--address", daemon)
        assert isinstance(done.exception, CliError), (args, done.output, done.exception)


def test_tiers_are_the_events_own() -> None:
    from services.cli.adapters.kvbm import TIERS

    stored = {tier.name: tier for tier in Tier if tier is not Tier.PEER}
    assert {name.upper(): number for name, number in TIERS.items()} == stored
