"""What a decision becomes: a placement, and its legs in the load book. Decides nothing."""

from __future__ import annotations

from services.common.ids import AttemptId
from services.router.core.answers import Placement, PrefillLeg
from services.router.core.choice import Page
from services.router.core.decide import Decision
from services.router.core.load import LoadBook
from services.router.core.policies import Policy
from services.router.core.requests import Incoming


def placed(decision: Decision, attempt_id: AttemptId, policy: Policy) -> Placement:
    """The answer; a leg that prefills goes under an id made of the request's."""
    page, leg, prompt = _decodes(decision), decision.split, decision.prompt
    score = policy.score(decision.ask, page.candidate)
    if leg is None or leg.prefill is None:
        return Placement(
            attempt_id,
            page.rank.holder,
            page.worker.info.address,
            page.candidate.g1_tokens + page.candidate.lower_tokens,
            score.ttft_s,
            policy.name,
            score,
            prompt.prefetch(page.worker.info, page.below) if page.below else None,
        )
    first, info = leg.prefill, leg.prefill.worker.info
    return Placement(
        attempt_id,
        page.rank.holder,
        page.worker.info.address,
        # What lies in lower tiers is of use to the first leg alone.
        page.candidate.g1_tokens,
        leg.ttft_s,
        policy.name,
        score,
        prompt.prefetch(info, first.below) if first.below else None,
        PrefillLeg(
            AttemptId(f"{attempt_id}-p"),
            first.rank.holder,
            info.address,
            first.candidate.g1_tokens + first.candidate.lower_tokens,
            leg.transfer_tokens,
            leg.transfer_s,
        ),
    )


def book(load: LoadBook, decision: Decision, placement: Placement) -> None:
    """All legs count as load from now on; the one that prefills goes first."""
    query, now, page = decision.query, decision.ask.now, _decodes(decision)
    leg, incoming = placement.prefill, None
    if leg is not None and decision.split is not None and decision.split.prefill is not None:
        first = decision.split.prefill
        load.book(
            first.rank.slot,
            leg.attempt_id,
            prompt_tokens=query.prompt_tokens,
            cached_tokens=leg.predicted_cached_tokens,
            keys=query.keys,
            now=now,
            onboards=first.candidate.lower_tokens > 0,
            then=placement.attempt_id,
        )
        _count(first)
        incoming = Incoming(leg.transfer_tokens, leg.holder.id, leg.transfer_s, leg.attempt_id)
    load.book(
        page.rank.slot,
        placement.attempt_id,
        prompt_tokens=query.prompt_tokens,
        cached_tokens=placement.predicted_cached_tokens,
        keys=query.keys,
        now=now,
        sequences=query.sequences,
        onboards=incoming is None and page.candidate.lower_tokens > 0,
        incoming=incoming,
    )
    _count(page)


def _decodes(decision: Decision) -> Page:
    return decision.split.decode if decision.split else decision.page


def _count(page: Page) -> None:
    page.rank.placements += 1
    page.candidate.placements = page.rank.placements
