"""An agent for each peer: one peer's trouble is not the others'; and what ends a read."""

import threading

import pytest

from services.worker.connector.transfer.agents import LOCAL, PeerAgents
from tests.fakes.agents import FakeAgent


class Bench:
    """PeerAgents over fakes, with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 2.0) -> None:
        self.now = 0.0
        self.made: list[FakeAgent] = []
        monkeypatch.setattr(
            "services.worker.connector.transfer.agents.time.monotonic", lambda: self.now
        )
        self.own = FakeAgent()
        self.agents = PeerAgents(self.own, self._make, timeout_s)
        self.agents.register_memory("cache", backends=["UCX"])
        self.local = self.agents.prep_xfer_dlist(LOCAL, "ours")

    def _make(self) -> FakeAgent:
        self.made.append(FakeAgent())
        return self.made[-1]

    def read(self, peer: str):  # type: ignore[no-untyped-def]
        remote = self.agents.prep_xfer_dlist(peer, "theirs")
        transfer = self.agents.make_prepped_xfer("READ", self.local, [0], remote, [0], b"done")
        self.agents.transfer(transfer)
        return transfer


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def ended(agent: FakeAgent) -> None:
    """Waits for an agent's end: a thread brings it about."""
    assert agent.ended.wait(5)


def test_each_peer_has_an_agent_with_the_same_memory(bench: Bench) -> None:
    assert bench.agents.add_remote_agent(b"one") == "one"
    assert bench.agents.add_remote_agent(b"two") == "two"
    assert [agent.registered for agent in bench.made] == [["cache"], ["cache"]]
    bench.read("one")
    bench.read("one")
    # Our own descriptors are prepared once for each peer that reads.
    assert [name for name, _ in bench.made[0].prepared].count(LOCAL) == 1
    assert bench.made[1].prepared == []


def test_a_read_ends_well(bench: Bench) -> None:
    bench.agents.add_remote_agent(b"one")
    transfer = bench.read("one")
    assert bench.agents.check_xfer_state(transfer) == "PROC"
    bench.made[0].handles[0].state = "DONE"
    assert bench.agents.check_xfer_state(transfer) == "DONE"
    assert bench.agents.get_xfer_telemetry(transfer) == "telemetry"
    bench.agents.release_xfer_handle(transfer)
    assert bench.made[0].handles[0].released
    assert bench.agents.fences == 0


def test_a_late_read_is_an_error_only_when_its_agent_is_gone(bench: Bench) -> None:
    bench.agents.add_remote_agent(b"one")
    transfer = bench.read("one")
    gate = threading.Event()
    agent = bench.made[0]
    assert agent.agent is not None
    agent.agent.hold = gate
    bench.now = 2.5
    assert bench.agents.check_xfer_state(transfer) == "PROC"
    assert not bench.agents.check_remote_metadata("one")
    with pytest.raises(KeyError):
        bench.agents.send_notif("one", b"x")
    # The destruction is under way: what it reads into is not free yet.
    assert bench.agents.check_xfer_state(transfer) == "PROC"
    gate.set()
    ended(agent)
    while bench.agents.fences == 0:
        pass
    assert bench.agents.check_xfer_state(transfer) == "ERR"
    bench.agents.release_xfer_handle(transfer)
    assert not agent.handles[0].released, "its agent knows it no more"


def test_an_error_of_the_transport_is_fenced_too(bench: Bench) -> None:
    bench.agents.add_remote_agent(b"one")
    first, second = bench.read("one"), bench.read("one")
    bench.made[0].handles[0].state = "ERR"
    assert bench.agents.check_xfer_state(first) == "PROC"
    ended(bench.made[0])
    while bench.agents.fences == 0:
        pass
    assert bench.agents.check_xfer_state(first) == "ERR"
    assert bench.agents.check_xfer_state(second) == "ERR"


def test_one_peers_fence_leaves_others_alone(bench: Bench) -> None:
    bench.agents.add_remote_agent(b"one")
    bench.agents.add_remote_agent(b"two")
    bad, good = bench.read("one"), bench.read("two")
    bench.made[0].handles[0].state = "ERR"
    bench.agents.check_xfer_state(bad)
    ended(bench.made[0])
    bench.made[1].handles[0].state = "DONE"
    assert bench.agents.check_xfer_state(good) == "DONE"
    assert not bench.made[1].ended.is_set()


def test_a_peer_that_is_removed_can_come_again(bench: Bench) -> None:
    bench.agents.add_remote_agent(b"one")
    transfer = bench.read("one")
    bench.agents.remove_remote_agent("one")
    assert bench.made[0].ended.is_set()
    assert bench.agents.check_xfer_state(transfer) == "ERR"
    bench.agents.add_remote_agent(b"one")
    again = bench.read("one")
    assert bench.agents.check_xfer_state(again) == "PROC"
    assert bench.agents.check_remote_metadata("one")


def test_notices_come_to_our_own_agent(bench: Bench) -> None:
    bench.own.inbox = {"somebody": [b"req:1"]}
    assert bench.agents.get_new_notifs() == {"somebody": [b"req:1"]}
    bench.agents.add_remote_agent(b"one")
    bench.agents.send_notif("one", b"HB:req")
    assert bench.made[0].notices == [("one", b"HB:req")]


def test_memory_goes_when_all_reads_have_ended(bench: Bench) -> None:
    bench.agents.add_remote_agent(b"one")
    bench.read("one")
    bench.agents.deregister_memory("cache")
    assert bench.made[0].ended.is_set()
    assert bench.own.registered == []
