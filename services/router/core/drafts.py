"""What there is to know of one prompt, written into candidates as far as anybody asks for it.

Mostly that is a few of many: those where something of the prompt is, and the one chosen. What all
others cost is worked out in one go (board.py).
"""

from __future__ import annotations

from services.router.core.answers import Query
from services.router.core.board import Costs, Load
from services.router.core.books import Books
from services.router.core.choice import Choice, Page
from services.router.core.cost import Candidate, CostModel
from services.router.core.repeats import NOTHING, RepeatBook
from services.router.core.usable import MIXED, Prompt


class Drafts:
    """The candidates of one decision. `wipe` them in any case before the next."""

    def __init__(self, books: Books, cost: CostModel) -> None:
        self._books = books
        self._cost = cost
        self._written: dict[int, Page] = {}
        self._repeats = NOTHING
        self._share = 0.0
        self._query: Query
        self._prompt: Prompt

    def begin(self, query: Query, prompt: Prompt, repeats: RepeatBook | None, among: int) -> None:
        """From now on it is about this prompt. `repeats` count beyond an even share of so many."""
        self._books.refresh()
        self._query, self._prompt = query, prompt
        deepest = max(prompt.depths.values(), default=0)
        if deepest and repeats is not None:
            prompt.fork = query.keys[deepest - 1]
            self._repeats, self._share = repeats.at(prompt.fork), repeats.tokens / among
        for slot in prompt.depths:
            self.of(self._books.pages[slot])

    def of(self, page: Page) -> Candidate:
        """A candidate as the prompt finds it."""
        slot, c = page.rank.slot, page.candidate
        if slot in self._written:
            return c
        self._written[slot] = page
        prompt, tokens, block = self._prompt, self._query.prompt_tokens, self._query.block_size or 1
        c.prompt_tokens = tokens
        own = prompt.depths.get(slot)
        if own is not None:
            # A last block may be partly filled, and one token is always computed.
            c.g1_tokens = min(own * block, max(0, tokens - 1))
            c.mates = prompt.crowd(slot)
            if slot in self._repeats:
                repeats = self._repeats[slot] - self._share
                # Less than a block more is nothing.
                if repeats >= block:
                    c.repeats = repeats
        info = page.worker.info
        if info.kvbm:
            usable = prompt.at(info, slot, c.token_s)
            overlap = usable.overlap
            if overlap.lower:
                c.g2_tokens = overlap.g2 * block
                c.g3_tokens = overlap.g3 * block
                c.g4_tokens = overlap.g4 * block
                c.peer_tokens = overlap.peer * block
                c.onboard_s = usable.onboard_s
                page.below = usable
        return c

    def totals(self, choice: Choice, now: float) -> Costs:
        """What `CostModel.total` says of each in choice, hardly any of them written; holds until
        the next call.
        """
        costs = choice.sheet.totals(now, self._query.prompt_tokens)
        loads = self._loads(choice) if choice.above else ()
        warm = [
            (number, costs[number] + self._cost.warmth(page.candidate))
            for slot, page in self._written.items()
            if (number := choice.numbers.get(slot)) is not None
        ]
        if any(tokens for tokens, _, _ in loads):
            choice.sheet.lighten(loads)
        for number, cost in warm:
            costs[number] = cost
        return costs

    def wipe(self) -> None:
        """What was written of one prompt must not weigh for the next."""
        for page in self._written.values():
            page.wipe()
        self._written.clear()
        self._repeats = NOTHING

    def _loads(self, choice: Choice) -> list[Load]:
        """What each daemon beneath brings to those above it that have nothing of their own."""
        loads: list[Load] = []
        for (where, numbers), (fastest_s, slowest_s) in zip(
            choice.above.items(), choice.sheet.spread(), strict=True
        ):
            beneath = self._prompt.beneath(*where, fastest_s, slowest_s)
            if beneath is None:
                loads.append((0, 0.0, 0.0))
                continue
            if beneath is MIXED:
                for number in numbers:
                    self.of(choice.pages[number])
            loads.append((beneath.tokens, beneath.load_s, beneath.load_tokens))
        return loads
