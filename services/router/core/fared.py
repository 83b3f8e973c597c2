"""How each worker fared in a decision, in words for people: the rows of a scorecard."""

from __future__ import annotations

from dataclasses import replace

from services.router.core.answers import Scored
from services.router.core.choice import Choice, Verdict
from services.router.core.policies import Ask, Policy


def fared(choice: Choice, verdict: Verdict, policy: Policy, ask: Ask) -> list[Scored]:
    """All that were in choice, whoever was chosen first, then by cost."""
    costs, best = verdict.costs, verdict.best
    return [
        Scored(
            page.rank.holder,
            replace(page.candidate),
            policy.score(ask, page.candidate),
            i == best,
            None,
            "" if i == best else _why_lost(i, choice, verdict, policy, ask),
        )
        for i, page in sorted(
            enumerate(choice.pages), key=lambda numbered: (numbered[0] != best, costs[numbered[0]])
        )
    ]


def _why_lost(i: int, choice: Choice, verdict: Verdict, policy: Policy, ask: Ask) -> str:
    costs, best = verdict.costs, verdict.best
    winner = choice.pages[best].rank.holder.id
    if verdict.stays:
        return f"the session stays with {winner}"
    if costs[i] < costs[best] - policy.tolerance:
        return f"its queue is longer than the limit; {winner} is free sooner"
    if costs[i] <= costs[best] + policy.tolerance:
        return f"level with {winner}; the lot fell on that one"
    mine, least = (policy.score(ask, choice.candidates[n]).total_s for n in (i, best))
    if mine:
        return f"{(mine - least) * 1000:.1f} ms more than {winner}"
    return f"comes after {winner} in the policy's order"
