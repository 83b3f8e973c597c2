"""The fair queue: turns by tokens, priorities, deadlines, mates, bounds; against plain lists."""

from collections import Counter
from collections.abc import Collection

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.router.core.queue import MATES_IN_A_ROW, Entry, FairQueue


class Rig:
    """A queue and short words for it; numbers count up."""

    def __init__(self, most: int = 100) -> None:
        self.queue = FairQueue(most)
        self.number = 0

    def put(
        self,
        tenant: str = "a",
        tokens: int = 100,
        priority: int = 0,
        until: float = 50.0,
        mate: int | None = None,
        lane: str = "m",
    ) -> Entry | None:
        self.number += 1
        entry = Entry(self.number, lane, tenant, priority, tokens, 0.0, until, mate)
        gone = self.queue.put(entry)
        self.queue.check_invariants()
        return gone

    def take(self, closed: Collection[str] = ()) -> Entry | None:
        entry = self.queue.next(closed)
        if entry is not None:
            assert self.queue.next(closed) == entry, "asking changes nobody's turn"
            self.queue.take(entry.number)
        self.queue.check_invariants()
        return entry

    def tenants(self, turns: int) -> str:
        return "".join(entry.tenant for _ in range(turns) if (entry := self.take()))


def test_a_tenant_with_a_hundred_requests_does_not_hold_up_one_with_five() -> None:
    rig = Rig(200)
    for _ in range(100):
        rig.put("a")
    for _ in range(5):
        rig.put("b")
    assert rig.tenants(12) == "ababababab" + "aa"


def test_turns_are_by_tokens() -> None:
    rig = Rig()
    for _ in range(10):
        rig.put("a", tokens=4000)
        for _ in range(4):
            rig.put("b", tokens=1000)
    got: Counter[str] = Counter()
    for _ in range(25):
        entry = rig.take()
        assert entry is not None
        got[entry.tenant] += entry.tokens
        assert abs(got["a"] - got["b"]) <= 4000
    assert got["a"] >= 16_000


def test_higher_priorities_go_first_and_then_the_most_urgent() -> None:
    rig = Rig()
    for priority, until in ((0, 9.0), (0, 3.0), (2, 8.0), (-1, 1.0), (0, 5.0)):
        rig.put("a", priority=priority, until=until)
    order = []
    while (entry := rig.take()) is not None:
        order.append((entry.priority, entry.until))
    assert order == [(2, 8.0), (0, 3.0), (0, 5.0), (0, 9.0), (-1, 1.0)]


def test_mates_go_together_and_their_tenant_pays_for_it() -> None:
    rig = Rig()
    for i in range(4):
        rig.put("a", mate=7 if i % 2 == 0 else 8, until=10.0 + i)
    for _ in range(9):
        rig.put("b")
    assert rig.tenants(3) == "aab", "the two that share 7 are not parted"
    # Two were its turn and the next; so b has the one after as well.
    assert rig.tenants(3) == "baa"
    assert rig.tenants(2) == "bb"


def test_a_popular_prefix_gives_way_after_some() -> None:
    rig = Rig()
    for _ in range(30):
        rig.put("a", mate=7)
    for _ in range(30):
        rig.put("b")
    turns = rig.tenants(MATES_IN_A_ROW + 8)
    assert turns == "a" * MATES_IN_A_ROW + "b" * 8


def test_who_leaves_in_debt_comes_back_in_debt() -> None:
    rig = Rig()
    for _ in range(4):
        rig.put("a", mate=7)
    for _ in range(20):
        rig.put("b")
    assert rig.tenants(4) == "aaaa"
    for _ in range(2):
        rig.put("a")
    assert rig.tenants(5) == "bbbba"


def test_mates_do_not_hold_up_higher_priorities() -> None:
    rig = Rig()
    for _ in range(3):
        rig.put("a", mate=7)
    assert rig.tenants(1) == "a"
    rig.put("b", priority=1)
    assert rig.tenants(3) == "baa"


def test_a_busy_lane_is_passed_over_and_keeps_its_turn() -> None:
    rig = Rig()
    rig.put("a", lane="busy", until=1.0)
    rig.put("a", lane="m", until=2.0)
    rig.put("b", lane="busy")
    first = rig.take(closed={"busy"})
    assert first is not None and first.lane == "m"
    assert rig.take(closed={"busy"}) is None
    second = rig.take()
    assert second is not None and second.tenant == "b", "a has had its turn"


def test_when_full_the_latest_of_the_heaviest_goes() -> None:
    rig = Rig(3)
    for until in (5.0, 7.0, 6.0):
        assert rig.put("a", until=until) is None
    gone = rig.put("b")
    assert gone is not None and (gone.tenant, gone.until) == ("a", 7.0)
    again = rig.put("a", until=9.0)
    assert again is not None and again.number == rig.number, "itself"
    low = rig.put("c", priority=-1)
    assert low is not None and low.number == rig.number, "lower ones displace nobody"
    gone = rig.put("c", priority=1)
    assert gone is not None and gone.priority == 0


def test_nothing_waits_where_there_is_no_room() -> None:
    rig = Rig(0)
    gone = rig.put()
    assert gone is not None and gone.number == 1 and len(rig.queue) == 0


def test_what_is_ahead_counts_others_up_to_ones_own_share() -> None:
    rig = Rig()
    for _ in range(10):
        rig.put("a", tokens=1000)
    rig.put("b", tokens=300)
    rig.put("c", tokens=50, priority=1)
    new = Entry(99, "m", "b", 0, 200, 0.0, 60.0)
    assert rig.queue.ahead(new, {"m": 1.0}) == 50 + 300 + 500
    urgent = Entry(99, "m", "b", 0, 200, 0.0, 1.0)
    assert rig.queue.ahead(urgent, {"m": 1.0}) == 50 + 200
    assert rig.queue.ahead(new, {"m": 0.5}) == 25 + 150 + 350
    assert rig.queue.ahead(new, {"other": 1.0}) == 0
    assert rig.queue.heavy("a") and not rig.queue.heavy("b") and not rig.queue.heavy("new")


class QueueMachine(RuleBasedStateMachine):
    """Any order of what can happen, beside a list of what is there."""

    MOST = 8

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(self.MOST)
        self.now = 0.0
        self.there: dict[int, Entry] = {}

    @rule(
        tenant=st.sampled_from("abc"),
        tokens=st.integers(1, 5000),
        priority=st.integers(-1, 1),
        wait=st.floats(0.1, 20.0),
        mate=st.sampled_from([None, 1, 2]),
        lane=st.sampled_from("xy"),
    )
    def put(
        self, tenant: str, tokens: int, priority: int, wait: float, mate: int | None, lane: str
    ) -> None:
        full = len(self.there) == self.MOST
        gone = self.rig.put(tenant, tokens, priority, self.now + wait, mate, lane)
        number = self.rig.number
        until = self.now + wait
        entry = Entry(number, lane, tenant, priority, tokens, 0.0, until, mate)
        self.there[number] = entry
        assert (gone is not None) == full
        if gone is not None:
            assert gone.priority == min(e.priority for e in self.there.values())
            del self.there[gone.number]

    @rule(closed=st.sets(st.sampled_from("xy")))
    def take(self, closed: set[str]) -> None:
        may = [e for e in self.there.values() if e.lane not in closed]
        got = self.rig.take(closed)
        assert (got is None) == (not may)
        if got is None:
            return
        assert self.there.pop(got.number) == got
        assert got.lane not in closed
        assert got.priority == max(e.priority for e in may)
        mine = [e for e in may if (e.tenant, e.priority) == (got.tenant, got.priority)]
        if got.mate is None:
            assert got.until == min(e.until for e in mine)
        else:
            assert got.until == min(e.until for e in mine if e.mate == got.mate)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.there)))
        assert self.rig.queue.remove(number) == self.there.pop(number)
        assert self.rig.queue.remove(number) is None

    @rule(seconds=st.floats(0.1, 10.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        gone = set()
        while (entry := self.rig.queue.expired(self.now)) is not None:
            gone.add(entry.number)
        assert gone == {n for n, e in self.there.items() if e.until <= self.now}
        for number in gone:
            del self.there[number]

    @invariant()
    def holds(self) -> None:
        self.rig.queue.check_invariants()
        assert {e.number: e for e in self.rig.queue} == self.there


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase
