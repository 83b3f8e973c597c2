"""An agent for each peer: one peer's trouble is not the others'; and what ends a read."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from services.worker.connector.transfer.agents import PeerAgents
from services.worker.connector.transfer.peer import LOCAL, Transfer
from tests.fakes.agents import FakeAgent


class Bench:
    """PeerAgents over fakes, with a clock of its own for deadlines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 2.0) -> None:
        self.now = 0.0
        self.made: list[FakeAgent] = []
        monkeypatch.setattr("services.worker.connector.transfer.peer._now", lambda: self.now)
        self.own = FakeAgent()
        self.agents = PeerAgents(self.own, self._make, timeout_s)
        self.agents.register_memory("cache", backends=["UCX"])
        self.local = self.agents.prep_xfer_dlist(LOCAL, "ours")

    def _make(self) -> FakeAgent:
        self.made.append(FakeAgent())
        return self.made[-1]

    def read(self, peer: str) -> Transfer:
        remote = self.agents.prep_xfer_dlist(peer, "theirs")
        transfer = self.agents.make_prepped_xfer(
            "READ",
            self.local,  # type: ignore[arg-type]
            [0],
            remote,  # type: ignore[arg-type]
            [0],
            b"done",
        )
        self.agents.transfer(transfer)
        return transfer

    def posted(self, agent: int = 0, reads: int = 1) -> None:
        """Waits until so many reads were begun."""
        handles = self.made[agent].handles
        until(lambda: len([h for h in handles if h.posted]) == reads)


def until(condition: Callable[[], object]) -> None:
    """Waits for what the threads bring about."""
    deadline = time.perf_counter() + 5
    while not condition():
        assert time.perf_counter() < deadline
        time.sleep(0.0005)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    yield bench
    bench.agents.close()


def test_each_peer_has_an_agent_with_the_same_memory(bench: Bench) -> None:
    assert bench.agents.add_remote_agent(b"one") == "one"
    assert bench.agents.add_remote_agent(b"two") == "two"
    assert [agent.registered for agent in bench.made] == [["cache"], ["cache"]]
    bench.read("one")
    bench.read("one")
    bench.posted(reads=2)
    # Our own descriptors are prepared once for each peer that is read from.
    assert [name for name, _ in bench.made[0].prepared].count(LOCAL) == 1
    assert bench.made[1].prepared == []


def test_a_read_ends_well(bench: Bench) -> None:
    bench.agents.add_remote_agent(b"one")
    transfer = bench.read("one")
    bench.posted()
    assert bench.agents.check_xfer_state(transfer) == "PROC"
    bench.made[0].handles[0].state = "DONE"
    until(lambda: bench.agents.check_xfer_state(transfer) == "DONE")
    assert bench.agents.get_xfer_telemetry(transfer) == "telemetry"
    bench.agents.release_xfer_handle(transfer)
    assert bench.agents.fences == 0


def test_only_an_agents_own_thread_calls_it(bench: Bench) -> None:
    """Some calls take as long as a copy: the engine's thread must not be in them, nor behind."""
    bench.agents.add_remote_agent(b"one")
    bench.made[0].copying = threading.Event()
    first = bench.read("one")
    began = time.perf_counter()
    bench.agents.send_notif("one", b"HB:x")
    second = bench.read("one")
    bench.agents.check_xfer_state(first)
    bench.agents.release_xfer_handle(second)
    assert time.perf_counter() - began < 1
    bench.made[0].copying.set()
    bench.posted(reads=2)
    assert bench.made[0].threads == {"nixl-peer-one"}


def test_a_late_read_is_an_error_only_when_its_agent_is_gone(bench: Bench) -> None:
    bench.agents.add_remote_agent(b"one")
    transfer = bench.read("one")
    gate = threading.Event()
    agent = bench.made[0]
    assert agent.agent is not None
    agent.agent.hold = gate
    bench.posted()
    bench.now = 2.5
    until(lambda: not bench.agents.check_remote_metadata("one"))
    with pytest.raises(KeyError):
        bench.agents.send_notif("one", b"x")
    # The destruction is under way: what it reads into is not free yet.
    assert bench.agents.check_xfer_state(transfer) == "PROC"
    gate.set()
    until(lambda: bench.agents.check_xfer_state(transfer) == "ERR")
    assert agent.ended.is_set()
    bench.agents.remove_remote_agent("one")
    until(lambda: bench.agents.fences == 1)


def test_a_reads_time_runs_from_its_own_begin(bench: Bench) -> None:
    """What was begun before it may have taken long."""
    bench.agents.add_remote_agent(b"one")
    bench.made[0].copying = threading.Event()
    transfer = bench.read("one")
    bench.now = 100.0
    bench.made[0].copying.set()
    bench.posted()
    time.sleep(0.01)
    assert bench.agents.check_xfer_state(transfer) == "PROC"
    assert bench.agents.check_remote_metadata("one")


@pytest.mark.parametrize("state", ["ERR", "raise"])
def test_an_error_of_the_transport_is_fenced_too(bench: Bench, state: str) -> None:
    bench.agents.add_remote_agent(b"one")
    first, second = bench.read("one"), bench.read("one")
    bench.posted(reads=2)
    bench.made[0].handles[0].state = state
    until(lambda: bench.agents.check_xfer_state(first) == "ERR")
    assert bench.made[0].ended.is_set()
    assert bench.agents.check_xfer_state(second) == "ERR"


def test_one_peers_fence_leaves_others_alone(bench: Bench) -> None:
    bench.agents.add_remote_agent(b"one")
    bench.agents.add_remote_agent(b"two")
    bad, good = bench.read("one"), bench.read("two")
    bench.posted(0)
    bench.posted(1)
    bench.made[0].handles[0].state = "ERR"
    until(lambda: bench.agents.check_xfer_state(bad) == "ERR")
    bench.made[1].handles[0].state = "DONE"
    until(lambda: bench.agents.check_xfer_state(good) == "DONE")
    assert not bench.made[1].ended.is_set()


def test_our_own_agents_trouble_stops_no_deadline(bench: Bench) -> None:
    bench.agents.add_remote_agent(b"one")
    bench.own.broken = True
    transfer = bench.read("one")
    bench.posted()
    bench.now = 3.0
    until(lambda: bench.agents.check_xfer_state(transfer) == "ERR")


def test_a_peer_that_is_removed_can_come_again(bench: Bench) -> None:
    bench.agents.add_remote_agent(b"one")
    transfer = bench.read("one")
    bench.agents.remove_remote_agent("one")
    until(lambda: bench.agents.check_xfer_state(transfer) == "ERR")
    assert bench.made[0].ended.is_set()
    bench.agents.add_remote_agent(b"one")
    again = bench.read("one")
    bench.posted(1)
    assert bench.agents.check_xfer_state(again) == "PROC"
    assert bench.agents.check_remote_metadata("one")


def test_notices_come_to_our_own_agent_and_leave_by_an_idle_one(bench: Bench) -> None:
    bench.own.inbox = {"somebody": [b"req:1"]}
    heard: dict[str, list[bytes]] = {}
    until(lambda: heard.update(bench.agents.get_new_notifs()) or heard)
    assert heard == {"somebody": [b"req:1"]}
    bench.agents.add_remote_agent(b"one")
    bench.agents.send_notif("one", b"HB:req")
    # Though nothing is read, the agent is driven: else what it has to tell would stay.
    until(lambda: bench.made[0].sent == [b"HB:req"])


def test_memory_goes_when_all_agents_have(bench: Bench) -> None:
    bench.agents.add_remote_agent(b"one")
    bench.read("one")
    bench.agents.deregister_memory("cache")
    assert bench.made[0].ended.is_set()
    assert bench.own.registered == []
