"""Decisions: who gets a request, of those in choice, and whether another worker prefills for it.

Has what there is to know of a prompt written into the candidates (drafts.py), asks the policy,
compares the two ways to serve it (apart.py), and wipes all off again. Books nothing: that is
booking.py's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from services.router.core.answers import PathScore, Query, Scored
from services.router.core.apart import (
    ApartConfig,
    Disagg,
    Limits,
    Obstacle,
    Pairing,
    Path,
    path_score,
)
from services.router.core.board import Costs, level
from services.router.core.books import Books
from services.router.core.choice import Choice, Page, Verdict, Way, way_of
from services.router.core.cost import Candidate, CostModel
from services.router.core.drafts import Drafts
from services.router.core.fared import fared
from services.router.core.policies import Ask, Policy, PolicyName
from services.router.core.repeats import RepeatBook
from services.router.core.sessions import SessionBook, home_of, session_key
from services.router.core.usable import Prompt

_MOST_REPEATS = 64
"""Models whose last placements are remembered."""


class Dice(Protocol):
    """Where chance comes from: a seeded random.Random will do."""

    def randrange(self, stop: int, /) -> int:
        """A number from 0 to stop - 1."""


@dataclass(slots=True)
class Decision:
    """What was decided, as long as the candidates are written."""

    choice: Choice
    query: Query
    prompt: Prompt
    ask: Ask
    verdict: Verdict
    limits: Limits
    whole: Path | None = None
    """None: it was not looked at."""
    apart: Path | Obstacle | None = None
    """None: no worker has the role of prefill, or nobody has time."""
    split: Path | None = None
    """The way apart, if that is taken."""

    @property
    def page(self) -> Page:
        """Who would do all of it."""
        return self.choice.pages[self.verdict.best]


class Decider:
    """Policy, sessions and repeats, over the books. For one thread."""

    def __init__(
        self,
        books: Books,
        policy: Policy,
        cost: CostModel,
        apart: ApartConfig,
        sessions: SessionBook,
        session_wait_s: float,
        dice: Dice,
    ) -> None:
        self._books = books
        self._policy = policy
        self._kv = policy.name is PolicyName.KV
        self._drafts = Drafts(books, cost)
        self._when = apart.when
        self._pairing = Pairing(apart, cost, books.transfers)
        self._sessions = sessions
        self._session_wait_s = session_wait_s
        self._dice = dice
        self._lot = dice.randrange(1 << 62)
        self._repeats: dict[str, RepeatBook] = {}

    def decide(
        self, choice: Choice, query: Query, now: float, max_wait_s: float, spared: Set[int]
    ) -> Decision:
        """Who gets a request. Has no effect but on the candidates: `wipe` them in any case."""
        prompt = self._books.prompt(query.keys, query.prompt_tokens, query.block_size, now)
        pool = None
        if self._when is not Disagg.NEVER:
            pool = self._books.choices.pool(query, choice, now)
        repeats = self._repeated(query.model) if self._kv else None
        # Both pools share what is to be computed.
        among = len(choice.pages) + (len(pool.pages) if pool else 0)
        self._drafts.begin(query, prompt, repeats, among)
        ask = Ask(now, query.keys, query.block_size or 1, self._lot)
        limits = Limits(now, max_wait_s, spared)
        verdict = self._judge(choice, query, ask, limits)
        self._drafts.of(choice.pages[verdict.best])
        decision = Decision(choice, query, prompt, ask, verdict, limits)
        if pool is not None and verdict.in_time:
            self._look_apart(decision, pool)
        return decision

    def wipe(self) -> None:
        """What was written of one prompt must not weigh for the next."""
        self._drafts.wipe()

    def taken(self, decision: Decision) -> None:
        """A decision was carried out."""
        self._lot = self._dice.randrange(1 << 62)
        query, split = decision.query, decision.split
        page = split.decode if split else decision.page
        rank = page.rank
        computes = (split.prefill if split else None) or page
        if self._kv:
            self._repeated(query.model).placed(
                decision.prompt.fork, computes.rank.slot, computes.candidate.uncached_tokens
            )
        if query.session:
            key = session_key(query.session, query.model, query.tenant)
            self._sessions.went(key, (rank.holder.id, rank.holder.dp_rank), decision.ask.now)
        self._policy.chosen(rank.slot)

    # In words.

    def rows(self, decision: Decision) -> list[Scored]:
        """How all fared that were in choice."""
        for page in decision.choice.pages:
            self._drafts.of(page)
        return fared(decision.choice, decision.verdict, self._policy, decision.ask, decision.split)

    def ways(self, decision: Decision) -> tuple[PathScore, PathScore | None]:
        """The two ways to serve it; None where no worker prefills for others."""
        split, apart = decision.split, decision.apart
        whole = decision.whole or self._pairing.whole(decision.page, decision.ask.now)
        if self._when is Disagg.NEVER and self._books.choices.prefillers:
            apart = Obstacle.NEVER
        elif decision.query.whole and self._books.choices.prefillers:
            apart = Obstacle.ASKED
        elif apart is None and self._books.choices.prefillers:
            apart = self._pairing.hindrance(decision.page) or Obstacle.BUSY
        other = apart if isinstance(apart, Path) else None
        score = path_score(whole, split is None, other)
        match apart:
            case None:
                return score, None
            case Path():
                return score, path_score(apart, split is not None, whole)
            case Obstacle():
                return score, PathScore(reason=apart.value)

    def check_invariants(self) -> None:
        """Raises AssertionError when a memory contradicts itself."""
        self._sessions.check_invariants()
        for book in self._repeats.values():
            book.check_invariants()

    # Inside.

    def _judge(self, choice: Choice, query: Query, ask: Ask, limits: Limits) -> Verdict:
        """Who gets all of a request; without effect."""
        candidates = choice.candidates
        costs = self._costs(choice, ask)
        best = cheapest = self._best(costs)
        if query.session:
            best = self._home(choice, query, best, ask.now)
        if limits.free(candidates[best]):
            return Verdict(best, costs, best != cheapest, True)
        free = [i for i, c in enumerate(candidates) if limits.free(c)]
        if not free:
            return Verdict(best, costs, best != cheapest, False)
        return Verdict(free[self._best([costs[i] for i in free])], costs, False, True)

    def _costs(self, choice: Choice, ask: Ask) -> Costs:
        """What the policy says of each in choice."""
        if self._kv:
            return self._drafts.totals(choice, ask.now)
        return self._policy.costs(ask, [self._drafts.of(page) for page in choice.pages])

    def _look_apart(self, decision: Decision, pool: Choice) -> None:
        page, limits = decision.page, decision.limits
        decision.apart = self._pairing.hindrance(page)
        if decision.apart is not None:
            return
        decision.whole = self._pairing.whole(page, limits.now)
        # Other policies say who decodes. So does a session: what it says next is cached there.
        if self._kv and not decision.query.session:
            decoders: Mapping[Way, Sequence[Page]] = decision.choice.ways
        else:
            decoders = {way_of(page.worker.info): [page]} if page.worker.info.transfer else {}
        for page in itertools.chain(pool.pages, *decoders.values()):
            self._drafts.of(page)
        apart = self._pairing.apart(decoders, pool, limits, decision.ask.lot)
        decision.apart = apart
        always = self._when is Disagg.ALWAYS
        if isinstance(apart, Path) and (always or apart.pays_beside(decision.whole)):
            decision.split = apart

    def _repeated(self, model: str) -> RepeatBook:
        book = self._repeats.get(model)
        if book is None:
            if len(self._repeats) >= _MOST_REPEATS:
                del self._repeats[next(iter(self._repeats))]
            book = self._repeats[model] = RepeatBook()
        return book

    def _best(self, costs: Costs) -> int:
        """Number of the cheapest; the lot decides between equal ones."""
        ties = level(costs, self._policy.tolerance)
        return ties[self._lot % len(ties)]

    def _home(self, choice: Choice, query: Query, best: int, now: float) -> int:
        """Number of the session's worker, if it is in choice and `best` is not far sooner."""
        places = [(page.rank.holder.id, page.rank.holder.dp_rank) for page in choice.pages]
        key = session_key(query.session, query.model, query.tenant)
        last = self._sessions.place(key, now)
        home = places.index(last) if last in places else home_of(key, places)
        there, sooner = (self._drafts.of(choice.pages[number]) for number in (home, best))
        wait = _ttft_s(there, now) - _ttft_s(sooner, now)
        return home if wait <= self._session_wait_s else best


def _ttft_s(c: Candidate, now: float) -> float:
    """Predicted seconds to the first token, whatever the policy."""
    return c.queue_s(now) + c.prefill_s + c.load_s()
