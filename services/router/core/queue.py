"""Requests that wait for room: who goes next, who has to go, and whose time is over.

Higher priorities go first. Within one, tenants take turns by tokens (deficit round robin: all that
wait are granted alike, each pays for what it gets), and a tenant's own go by deadline. Requests
that begin with the same blocks go together while these are warm: up to `MATES_IN_A_ROW` of one
tenant, which pays for them out of later turns. Some can't go while others can, since they may only
run on workers that are busy: such lanes are passed over, and nobody's turn is lost by it.

Bounded in entries, and each entry in time. When it is full, the latest request of the tenant that
asks for most goes, among the lowest priority. All is counted anew by scans: it is short, and in use
only where prompts wait for seconds.

Deficit round robin: Shreedhar, Varghese, IEEE/ACM ToN 4(3), 1996. Here the quantum is just what the
next request lacks, so that a turn costs the same whatever prompts are long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

MATES_IN_A_ROW = 8
"""Most requests of one prefix that go without others' turns between them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that waits. Times are seconds on the caller's clock."""

    number: int
    """Unique, rising: among equals the first comes first."""
    lane: Hashable
    """Whoever may run on just the same workers."""
    tenant: str
    priority: int
    """Higher goes first."""
    tokens: int
    """What it costs its tenant; at least 1."""
    since: float
    until: float
    """When it is no longer of use."""
    mate: int | None = None
    """Equal for those that begin with the same blocks."""


@dataclass(slots=True)
class _Account:
    """A tenant: what it has been granted and not used (negative: used ahead), and its requests."""

    credit: int = 0
    levels: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    """By priority, (until, number) in order; no empty ones."""


@dataclass(slots=True)
class _Run:
    """Mates that go together."""

    tenant: str
    priority: int
    mate: int
    left: int


class FairQueue:
    """At most `most` entries. `next` and `take` let them go in fair order."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[int, Entry] = {}
        self._order: list[tuple[float, int]] = []
        self._accounts: dict[str, _Account] = {}
        self._run: _Run | None = None
        self._dearest = 0
        """Tokens of the dearest entry since the queue was last empty; bounds credits."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def put(self, entry: Entry) -> Entry | None:
        """Adds an entry. Returns who had to go because of that: nobody, another, or itself."""
        victim = self._victim(entry) if len(self._entries) >= self._most else None
        if victim is entry:
            return victim
        if victim is not None:
            self.remove(victim.number)
        self._entries[entry.number] = entry
        insort(self._order, (entry.until, entry.number))
        account = self._accounts.setdefault(entry.tenant, _Account())
        insort(account.levels.setdefault(entry.priority, []), (entry.until, entry.number))
        self._dearest = max(self._dearest, entry.tokens)
        return victim

    def next(self, closed: Collection[Hashable] = ()) -> Entry | None:
        """Whose turn it is, `closed` lanes passed over; it stays. None: nobody's."""
        heads = self._heads(closed)
        if not heads:
            return None
        level = max(entry.priority for entry in heads)
        mate = self._mate(level, closed)
        if mate is not None:
            return mate
        heads = [entry for entry in heads if entry.priority == level]
        lacks = [max(0, e.tokens - self._accounts[e.tenant].credit) for e in heads]
        grant = min(lacks)
        if grant:
            self._grant([e.tenant for e in heads], grant)
        return heads[lacks.index(grant)]

    def take(self, number: int) -> Entry:
        """An entry goes, on its tenant's account, which has its next turn after all others."""
        entry = self._entries[number]
        account = self._accounts.pop(entry.tenant)
        account.credit -= entry.tokens
        self._accounts[entry.tenant] = account
        run = self._run
        mine = entry.tenant, entry.priority, entry.mate
        if run is not None and run.left > 0 and (run.tenant, run.priority, run.mate) == mine:
            run.left -= 1
        elif entry.mate is not None:
            left = MATES_IN_A_ROW - 1
            self._run = _Run(entry.tenant, entry.priority, entry.mate, left)
        else:
            self._run = None
        self.remove(number)
        return entry

    def remove(self, number: int) -> Entry | None:
        """An entry goes for nothing. None if it isn't there."""
        entry = self._entries.pop(number, None)
        if entry is None:
            return None
        place = entry.until, number
        del self._order[bisect_left(self._order, place)]
        account = self._accounts[entry.tenant]
        level = account.levels[entry.priority]
        del level[bisect_left(level, place)]
        if not level:
            del account.levels[entry.priority]
        if not self._entries:
            self._accounts.clear()
            self._run = None
            self._dearest = 0
        elif not account.levels:
            self._settle(entry.tenant)
        return entry

    def expired(self, now: float) -> Entry | None:
        """Removes and returns one whose time is over. None: nobody's is."""
        if not self._order or self._order[0][0] > now:
            return None
        return self.remove(self._order[0][1])

    def sort(self, lane_of: Callable[[int], Hashable]) -> None:
        """Lanes by number are others now; nobody's turn changes."""
        for number, entry in self._entries.items():
            self._entries[number] = replace(entry, lane=lane_of(number))

    def ahead(self, entry: Entry, shares: Mapping[Hashable, float]) -> float:
        """Tokens that would go before `entry`, which need not be there, to workers it may run on.

        `shares`: part of each lane's tokens that these get; of lanes that are not named, none.
        """
        total = own = 0.0
        others: dict[str, float] = {}
        for e in self:
            share = shares.get(e.lane)
            if not share or e.number == entry.number or e.priority < entry.priority:
                continue
            tokens = share * e.tokens
            if e.priority > entry.priority:
                total += tokens
            elif e.tenant != entry.tenant:
                others[e.tenant] = others.get(e.tenant, 0.0) + tokens
            elif (e.until, e.number) < (entry.until, entry.number):
                own += tokens
        # Until it has had that much, each of the others has as much at most.
        return total + own + sum(min(tokens, own + entry.tokens) for tokens in others.values())

    def heavy(self, tenant: str) -> bool:
        """Whether a tenant waits with more than its share of the tokens."""
        tokens: dict[str, int] = {tenant: 0}
        for e in self:
            tokens[e.tenant] = tokens.get(e.tenant, 0) + e.tokens
        return tokens[tenant] * len(tokens) > sum(tokens.values())

    def check_invariants(self) -> None:
        """Raises AssertionError when it contradicts itself."""
        assert len(self._entries) <= self._most
        places = sorted((e.until, e.number) for e in self)
        assert self._order == places
        listed = []
        idle = 0
        for tenant, account in self._accounts.items():
            assert account.levels or account.credit < 0, "an account of nobody"
            idle += not account.levels
            assert account.credit <= self._dearest
            assert account.credit >= -(MATES_IN_A_ROW + 1) * self._dearest
            for priority, level in account.levels.items():
                assert level, "an empty level"
                assert level == sorted(level)
                for _, number in level:
                    entry = self._entries[number]
                    assert (entry.tenant, entry.priority) == (tenant, priority)
                listed += level
        assert sorted(listed) == places
        assert idle <= self._most

    # Inside.

    def _heads(self, closed: Collection[Hashable]) -> list[Entry]:
        """Each tenant's most urgent one, of its highest priority that may go."""
        heads = []
        for account in self._accounts.values():
            for priority in sorted(account.levels, reverse=True):
                head = self._first(account.levels[priority], closed)
                if head is not None:
                    heads.append(head)
                    break
        return heads

    def _first(
        self, level: list[tuple[float, int]], closed: Collection[Hashable], mate: int | None = None
    ) -> Entry | None:
        for _, number in level:
            entry = self._entries[number]
            if (mate is None or entry.mate == mate) and entry.lane not in closed:
                return entry
        return None

    def _mate(self, level: int, closed: Collection[Hashable]) -> Entry | None:
        """The next of those that go together, unless somebody of a higher priority waits."""
        run = self._run
        if run is None or run.left <= 0 or run.priority != level:
            return None
        account = self._accounts.get(run.tenant)
        waiting = account.levels.get(level) if account else None
        return self._first(waiting, closed, run.mate) if waiting else None

    def _grant(self, tenants: list[str], tokens: int) -> None:
        """Grants tokens to those who wait, and to those who went ahead of their turn and left."""
        for tenant in tenants:
            self._accounts[tenant].credit += tokens
        for tenant in [t for t, account in self._accounts.items() if not account.levels]:
            self._accounts[tenant].credit += tokens
            self._settle(tenant)

    def _settle(self, tenant: str) -> None:
        """A tenant without entries: credit is void, a debt is kept while there is room for it."""
        if self._accounts[tenant].credit >= 0:
            del self._accounts[tenant]
            return
        idle = [t for t, account in self._accounts.items() if not account.levels]
        for other in idle[: max(0, len(idle) - self._most)]:
            del self._accounts[other]

    def _victim(self, entry: Entry) -> Entry:
        """Who goes when `entry` finds no room."""
        lowest = min((e.priority for e in self), default=entry.priority + 1)
        if entry.priority < lowest:
            return entry
        mine = [e for e in self if e.priority == lowest]
        if entry.priority == lowest:
            mine.append(entry)
        tokens: dict[str, int] = {}
        for e in mine:
            tokens[e.tenant] = tokens.get(e.tenant, 0) + e.tokens
        heaviest = max(tokens, key=lambda tenant: tokens[tenant])
        return max((e for e in mine if e.tenant == heaviest), key=lambda e: (e.until, e.number))
