"""How each worker fared in a decision, in words for people: the rows of a scorecard."""

from __future__ import annotations

from dataclasses import replace

from services.router.core.answers import Scored
from services.router.core.apart import Path
from services.router.core.choice import Choice, Page, Verdict
from services.router.core.policies import Ask, Policy


def fared(
    choice: Choice, verdict: Verdict, policy: Policy, ask: Ask, split: Path | None = None
) -> list[Scored]:
    """All that were in choice, whoever was chosen first, then by cost; `split`: the way that was
    taken, if prefill and decode are apart.
    """
    chosen = split.decode if split else choice.pages[verdict.best]
    numbered = enumerate(choice.pages)
    return [
        Scored(
            page.rank.holder,
            page.worker.info.role,
            replace(page.candidate),
            policy.score(ask, page.candidate),
            page is chosen,
            None,
            "" if page is chosen else _why_lost(i, chosen, choice, verdict, policy, ask, split),
        )
        for i, page in sorted(
            numbered, key=lambda one: (one[1] is not chosen, verdict.costs[one[0]])
        )
    ]


def _why_lost(
    i: int,
    chosen: Page,
    choice: Choice,
    verdict: Verdict,
    policy: Policy,
    ask: Ask,
    split: Path | None,
) -> str:
    costs, best = verdict.costs, verdict.best
    winner = chosen.rank.holder.id
    if verdict.stays:
        return f"the session stays with {winner}"
    if split is not None:
        return f"prefilled apart, the request goes on at {winner}"
    if costs[i] < costs[best] - policy.tolerance:
        return f"its queue is longer than the limit; {winner} is free sooner"
    if costs[i] <= costs[best] + policy.tolerance:
        return f"level with {winner}; the lot fell on that one"
    mine, least = (policy.score(ask, choice.candidates[n]).total_s for n in (i, best))
    if mine:
        return f"{(mine - least) * 1000:.1f} ms more than {winner}"
    return f"comes after {winner} in the policy's order"
