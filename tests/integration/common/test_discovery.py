"""Discovery against a real etcd, and all that etcd does to its clients."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from services.common.cards import Instance, InstanceKind
from services.common.discovery import (
    Discovery,
    DiscoveryEvent,
    Gone,
    Synced,
    Up,
    open_discovery,
)
from services.common.etcd.config import EtcdRefused
from services.common.settings import ServiceSettings
from tests.support.etcd import Etcd, EtcdCluster, make_tls
from tests.support.polling import until

WORKER = Instance("w1", InstanceKind.WORKER, 2**63 + 1, "h:1", labels={"a": "b"})
OTHER = Instance("w2", InstanceKind.WORKER, 5, "h:2")
KEY = "/forebay/default/worker/w1"


def told(etcd: Etcd, **more: Any) -> ServiceSettings:
    return ServiceSettings(
        **{"etcd_endpoints": (etcd.endpoint,), "lease_ttl_s": 2.0, "cluster": "default", **more}
    )


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with Etcd(tmp_path) as running:
        yield running


@dataclass
class Watcher:
    """What a watch told, kept as events and as the state they add up to."""

    discovery: Discovery
    kind: InstanceKind | None = InstanceKind.WORKER
    events: list[DiscoveryEvent] = field(default_factory=list)
    alive: dict[str, Instance] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        async for event in self.discovery.watch(self.kind):
            self.events.append(event)
            match event:
                case Up(instance):
                    self.alive[instance.id] = instance
                case Gone(_, id, incarnation):
                    assert self.alive.pop(id).incarnation == incarnation
            self.news.set()

    @property
    def changes(self) -> list[type[DiscoveryEvent]]:
        """Kinds of the events without Synced, which may come before or after the first Up."""
        return [type(e) for e in self.events if not isinstance(e, Synced)]

    async def until(self, condition: Callable[[], bool], within_s: float = 20) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                self.news.clear()
                await self.news.wait()

    async def until_alive(self, *instances: Instance) -> None:
        await self.until(lambda: sorted(self.alive) == sorted(i.id for i in instances))
        assert self.alive == {i.id: i for i in instances}


@contextlib.asynccontextmanager
async def watching(
    discovery: Discovery, kind: InstanceKind | None = InstanceKind.WORKER
) -> AsyncIterator[Watcher]:
    watcher = Watcher(discovery, kind)
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def pair(
    settings: ServiceSettings, others: ServiceSettings | None = None
) -> AsyncIterator[tuple[Watcher, Discovery]]:
    """A watcher, and another process's discovery."""
    async with (
        open_discovery(settings) as ours,
        open_discovery(others or settings) as theirs,
        watching(ours) as watcher,
    ):
        yield watcher, theirs


async def test_a_record_comes_changes_and_goes(etcd: Etcd) -> None:
    async with pair(told(etcd)) as (watcher, theirs):
        await watcher.until(lambda: watcher.events == [Synced()])
        async with theirs.registered(WORKER) as registration:
            await watcher.until_alive(WORKER)
            draining = replace(WORKER, draining=True)
            await registration.update(draining)
            await watcher.until(lambda: watcher.alive["w1"].draining)
            assert watcher.discovery.connected and theirs.connected
        assert etcd.keys() == []
        await watcher.until_alive()
        gone = Gone(InstanceKind.WORKER, "w1", WORKER.incarnation)
        assert watcher.events == [Synced(), Up(WORKER), Up(draining), gone]


async def test_the_value_is_protobuf_json_under_a_lease(etcd: Etcd) -> None:
    async with open_discovery(told(etcd)) as discovery, discovery.registered(WORKER) as mine:
        assert await mine.stored(10)
        (kv,) = json.loads(etcd.ctl("get", KEY, "-w", "json"))["kvs"]
        record = json.loads(etcd.ctl("get", KEY, "--print-value-only"))
        assert record["id"] == "w1" and record["incarnation"] == str(2**63 + 1)
        assert kv["lease"]


async def test_first_list_then_synced_and_only_the_kind_asked_for(etcd: Etcd) -> None:
    router = Instance("r1", InstanceKind.ROUTER, 7, "h:9")
    async with (
        open_discovery(told(etcd)) as theirs,
        theirs.registered(WORKER) as one,
        theirs.registered(router) as two,
    ):
        assert await one.stored(10) and await two.stored(10)
        async with watching(theirs) as workers, watching(theirs, None) as everyone:
            await workers.until(lambda: workers.events == [Up(WORKER), Synced()])
            await everyone.until(lambda: len(everyone.events) == 3)
            assert everyone.alive == {"w1": WORKER, "r1": router}
            assert everyone.events[-1] == Synced()


async def test_clusters_do_not_see_each_other(etcd: Etcd) -> None:
    async with (
        pair(told(etcd), told(etcd, cluster="default2")) as (watcher, theirs),
        theirs.registered(WORKER) as mine,
        open_discovery(told(etcd)) as same,
    ):
        assert await mine.stored(10)
        async with same.registered(OTHER):
            await watcher.until_alive(OTHER)


async def test_unreadable_records_are_skipped(etcd: Etcd) -> None:
    etcd.ctl("put", KEY, "not json")
    etcd.ctl("put", "/forebay/default/worker/w3", '{"id": "w3", "kind": "INSTANCE_KIND_NEW"}')
    etcd.ctl("put", "/forebay/default/worker/w4", '{"id": "x", "kind": "INSTANCE_KIND_WORKER"}')
    future = '{"id": "w5", "kind": "INSTANCE_KIND_WORKER", "address": "h:5", "newField": [1]}'
    etcd.ctl("put", "/forebay/default/worker/w5", future)
    async with pair(told(etcd)) as (watcher, theirs):
        await watcher.until(lambda: Synced() in watcher.events)
        assert list(watcher.alive) == ["w5"]
        async with theirs.registered(WORKER):
            await watcher.until(lambda: watcher.alive.get("w1") == WORKER)
        await watcher.until(lambda: list(watcher.alive) == ["w5"])


async def test_a_process_that_dies_is_gone_after_its_lease(etcd: Etcd) -> None:
    async with pair(told(etcd)) as (watcher, theirs):
        registered = theirs.registered(WORKER)
        await registered.__aenter__()
        await watcher.until_alive(WORKER)
        # Without its client the task can renew nothing: as dead as by kill -9.
        await theirs._client.close()
        await watcher.until_alive()
        await registered.__aexit__(None, None, None)


async def test_registration_begins_when_etcd_comes(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path)
    async with pair(told(etcd)) as (watcher, theirs), theirs.registered(WORKER) as mine:
        assert not await mine.stored(0.3)
        assert not theirs.connected
        await mine.update(replace(WORKER, draining=True), timeout_s=0.1)
        try:
            await asyncio.to_thread(etcd.start)
            await watcher.until_alive(replace(WORKER, draining=True))
        finally:
            etcd.kill()


async def test_a_watch_resumes_after_kill_and_restart_without_repeating(etcd: Etcd) -> None:
    async with pair(told(etcd)) as (watcher, theirs):
        async with theirs.registered(WORKER) as mine:
            await watcher.until_alive(WORKER)
            await asyncio.to_thread(etcd.kill)
            await mine.update(replace(WORKER, draining=True), timeout_s=0.1)
            await asyncio.to_thread(etcd.start)
            await watcher.until(lambda: watcher.alive["w1"].draining)
            async with theirs.registered(OTHER):
                await watcher.until(lambda: "w2" in watcher.alive)
        assert watcher.changes[:3] == [Up, Up, Up]


async def test_changes_while_disconnected_are_told_after_compaction(etcd: Etcd) -> None:
    etcd.ctl("put", "/forebay/default/worker/w5", _record("w5"))
    async with open_discovery(told(etcd)) as ours, watching(ours) as watcher:
        await watcher.until(lambda: "w5" in watcher.alive)
        # The watcher loses its connection, and cannot get it back while etcd is frozen over.
        await asyncio.to_thread(etcd.kill)
        port, etcd.port = etcd.port, etcd.peer_port + 1
        await asyncio.to_thread(etcd.start)
        etcd.ctl("del", "/forebay/default/worker/w5")
        for n in range(5):
            etcd.ctl("put", "/forebay/default/worker/w6", _record("w6", n + 1))
        etcd.ctl("compact", str(etcd.revision()))
        await asyncio.to_thread(etcd.kill)
        etcd.port = port
        await asyncio.to_thread(etcd.start)
        await watcher.until(lambda: "w6" in watcher.alive)
        assert list(watcher.alive) == ["w6"]
        assert [type(e) for e in watcher.events] == [Up, Synced, Gone, Up]
        assert watcher.alive["w6"].incarnation == 5


async def test_an_etcd_that_comes_back_empty_is_filled_again(etcd: Etcd) -> None:
    async with pair(told(etcd)) as (watcher, theirs), theirs.registered(WORKER):
        await watcher.until_alive(WORKER)
        await asyncio.to_thread(etcd.wipe)
        await asyncio.to_thread(etcd.start)
        await watcher.until_alive(WORKER)
        await until(lambda: _is(etcd.keys() == [KEY]), within_s=10, what="key put again")
        async with theirs.registered(OTHER):
            await watcher.until_alive(WORKER, OTHER)


async def test_another_history_with_more_revisions_is_noticed(etcd: Etcd) -> None:
    async with open_discovery(told(etcd)) as ours, watching(ours) as watcher:
        etcd.ctl("put", "/forebay/default/worker/w5", _record("w5"))
        await watcher.until(lambda: "w5" in watcher.alive)
        await asyncio.to_thread(etcd.wipe)
        # Filled anew, out of sight, past the revision the watcher knows.
        port, etcd.port = etcd.port, etcd.peer_port + 1
        await asyncio.to_thread(etcd.start)
        etcd.ctl("put", "/forebay/default/worker/w6", _record("w6"))
        for n in range(9):
            etcd.ctl("put", "x", str(n))
        await asyncio.to_thread(etcd.kill)
        etcd.port = port
        await asyncio.to_thread(etcd.start)
        await watcher.until(lambda: list(watcher.alive) == ["w6"])


async def test_a_frozen_etcd_is_waited_out(etcd: Etcd) -> None:
    async with pair(told(etcd, lease_ttl_s=30.0)) as (watcher, theirs):
        async with theirs.registered(WORKER) as mine:
            await watcher.until_alive(WORKER)
            etcd.freeze()
            try:
                await mine.update(replace(WORKER, draining=True), timeout_s=0.5)
                await asyncio.sleep(0)
                assert not watcher.alive["w1"].draining
            finally:
                etcd.thaw()
            await watcher.until(lambda: watcher.alive["w1"].draining)
        await watcher.until_alive()
        assert watcher.changes == [Up, Up, Gone]


async def test_a_revoked_lease_is_replaced(etcd: Etcd) -> None:
    async with pair(told(etcd)) as (watcher, theirs), theirs.registered(WORKER) as mine:
        assert await mine.stored(10)
        await watcher.until_alive(WORKER)
        (kv,) = json.loads(etcd.ctl("get", KEY, "-w", "json"))["kvs"]
        etcd.ctl("lease", "revoke", f"{kv['lease']:x}")
        await watcher.until_alive()
        await watcher.until_alive(WORKER)


async def test_a_deleted_key_is_put_again(etcd: Etcd) -> None:
    async with pair(told(etcd)) as (watcher, theirs), theirs.registered(WORKER) as mine:
        assert await mine.stored(10)
        await watcher.until_alive(WORKER)
        etcd.ctl("del", KEY)
        await watcher.until_alive()
        await watcher.until_alive(WORKER)


async def test_a_new_life_of_the_same_name_is_not_overwritten_or_removed_by_the_old(
    etcd: Etcd,
) -> None:
    new = replace(WORKER, incarnation=99)
    async with pair(told(etcd)) as (watcher, theirs), contextlib.AsyncExitStack() as stack:
        old = await stack.enter_async_context(theirs.registered(WORKER))
        await watcher.until_alive(WORKER)
        async with open_discovery(told(etcd)) as third, third.registered(new) as mine:
            assert await mine.stored(10)
            await watcher.until(lambda: watcher.alive["w1"] == new)
            await old.update(replace(WORKER, draining=True), timeout_s=0.3)
            await stack.aclose()
            assert etcd.keys() == [KEY]
            async with third.registered(OTHER):
                await watcher.until(lambda: "w2" in watcher.alive)
            assert watcher.alive["w1"] == new


async def test_a_dead_endpoint_is_passed_over(etcd: Etcd, unused_tcp_port: int) -> None:
    endpoints = (f"127.0.0.1:{unused_tcp_port}", etcd.endpoint)
    for _ in range(4):  # the first endpoint is drawn by chance
        async with pair(told(etcd, etcd_endpoints=endpoints)) as (watcher, theirs):
            async with theirs.registered(WORKER):
                await watcher.until_alive(WORKER)
            await watcher.until_alive()


async def test_members_of_a_cluster_replace_each_other(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path) as cluster:
        settings = told(cluster.members[0], etcd_endpoints=cluster.endpoints)
        async with pair(settings) as (watcher, theirs), theirs.registered(WORKER):
            await watcher.until_alive(WORKER)
            used = watcher.discovery._client.connection.endpoint
            (member,) = [m for m in cluster.members if m.endpoint == used]
            await asyncio.to_thread(member.kill)
            async with theirs.registered(OTHER):
                await watcher.until_alive(WORKER, OTHER)
            await watcher.until_alive(WORKER)


async def test_a_frozen_member_is_left(tmp_path: Path) -> None:
    """Its connections stay open: only its silence tells."""
    with EtcdCluster(tmp_path) as cluster:
        settings = told(cluster.members[0], etcd_endpoints=cluster.endpoints)
        async with open_discovery(settings) as ours, watching(ours) as watcher:
            await watcher.until(lambda: Synced() in watcher.events)
            used = ours._client.connection.endpoint
            (member,) = [m for m in cluster.members if m.endpoint == used]
            (other, _) = [m for m in cluster.members if m is not member]
            member.freeze()
            await until(lambda: _can_put(other), within_s=10, what="new leader")
            await watcher.until(lambda: "w1" in watcher.alive)
            assert ours._client.connection.endpoint != used


async def _can_put(member: Etcd) -> bool:
    try:
        await asyncio.to_thread(member.ctl, "put", KEY, _record("w1"))
    except subprocess.CalledProcessError:
        return False
    return True


async def test_a_member_without_a_leader_counts_as_away(tmp_path: Path) -> None:
    """It answers, but knows nothing new: its silence must not pass for peace."""
    with EtcdCluster(tmp_path) as cluster:
        alone, *others = cluster.members
        async with open_discovery(told(alone)) as ours, watching(ours) as watcher:
            await watcher.until(lambda: Synced() in watcher.events)
            assert ours.connected
            for member in others:
                await asyncio.to_thread(member.kill)
            await until(lambda: _is(not ours.connected), within_s=20, what="loss noticed")
            for member in others:
                await asyncio.to_thread(member.start, wait=False)
            await until(lambda: _can_put(alone), within_s=20, what="leader")
            await watcher.until(lambda: "w1" in watcher.alive)


async def _is(found: bool) -> bool:
    return found


def _record(id: str, incarnation: int = 1) -> str:
    return json.dumps(
        {
            "id": id,
            "kind": "INSTANCE_KIND_WORKER",
            "incarnation": str(incarnation),
            "address": "h:1",
        }
    )


async def test_tls_with_client_certificates(tmp_path: Path) -> None:
    tls = make_tls(tmp_path / "tls")
    with Etcd(tmp_path, tls=tls) as etcd:
        files = {
            "etcd_ca_file": str(tls.ca),
            "etcd_cert_file": str(tls.client_cert),
            "etcd_key_file": str(tls.client_key),
        }
        async with pair(told(etcd, **files)) as (watcher, theirs):
            async with theirs.registered(WORKER):
                await watcher.until_alive(WORKER)
            await watcher.until_alive()
        # Without a certificate of our own etcd does not let us in; without TLS neither.
        for less in ({"etcd_ca_file": str(tls.ca)}, {}):
            async with open_discovery(told(etcd, **less)) as discovery:
                async with discovery.registered(WORKER) as mine:
                    assert not await mine.stored(1.0)
                assert not discovery.connected


async def test_bad_tls_files_are_named(tmp_path: Path) -> None:
    tls = make_tls(tmp_path / "tls")
    settings = ServiceSettings(
        etcd_ca_file=str(tls.ca), etcd_cert_file=str(tls.client_cert), etcd_key_file=str(tls.key)
    )
    with pytest.raises(EtcdRefused, match=r"client\.pem.*server\.key"):
        async with open_discovery(settings):
            pass


async def test_user_and_password_with_tokens_that_expire(tmp_path: Path) -> None:
    with Etcd(tmp_path, arguments=("--auth-token-ttl", "1")) as etcd:
        for command in (
            "user add root:rootpw",
            "user grant-role root root",
            "role add forebay",
            "role grant-permission forebay readwrite --prefix=true /forebay/",
            "user add service:hunter2",
            "user grant-role service forebay",
            "auth enable",
        ):
            etcd.ctl(*command.split())
        known = {"etcd_user": "service", "etcd_password": "hunter2"}
        async with pair(told(etcd, lease_ttl_s=6.0, **known)) as (watcher, theirs):
            async with theirs.registered(WORKER) as mine:
                await watcher.until_alive(WORKER)
                # etcd forgets a token a second after its last use; the lease is renewed every two.
                token = theirs._client._token
                await until(lambda: _is(theirs._client._token not in (token, None)), within_s=20)
                await mine.update(replace(WORKER, draining=True))
                await watcher.until(lambda: watcher.alive["w1"].draining)
                # A restart forgets all tokens.
                await asyncio.to_thread(etcd.restart)
                await mine.update(WORKER)
                await watcher.until(lambda: not watcher.alive["w1"].draining)
                assert not any(isinstance(e, Gone) for e in watcher.events)
            await watcher.until_alive()


async def test_a_wrong_password_is_said_and_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Etcd(tmp_path) as etcd:
        for command in ("user add root:rootpw", "user grant-role root root", "auth enable"):
            etcd.ctl(*command.split())
        wrong = told(etcd, etcd_user="root", etcd_password="hunter2")
        async with open_discovery(wrong) as discovery:
            with pytest.raises(EtcdRefused, match="'root'") as caught:
                await discovery._client.range(b"x")
            assert "hunter2" not in str(caught.value)
        async with open_discovery(told(etcd)) as discovery:
            with pytest.raises(EtcdRefused, match="user name is empty"):
                await discovery._client.range(b"x")


async def test_a_password_where_etcd_wants_none_does_no_harm(etcd: Etcd) -> None:
    known = {"etcd_user": "service", "etcd_password": "hunter2"}
    async with pair(told(etcd, **known)) as (watcher, theirs), theirs.registered(WORKER):
        await watcher.until_alive(WORKER)


async def test_many_watch_and_register_at_once(etcd: Etcd) -> None:
    crowd = [replace(WORKER, id=f"w{n}", incarnation=n + 1) for n in range(50)]
    async with pair(told(etcd)) as (watcher, theirs), contextlib.AsyncExitStack() as stack:
        for instance in crowd:
            await stack.enter_async_context(theirs.registered(instance))
        await watcher.until_alive(*crowd)
        await asyncio.to_thread(etcd.restart)
        await stack.aclose()
        await watcher.until_alive()
