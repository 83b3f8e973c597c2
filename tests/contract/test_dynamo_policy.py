"""The policy `dynamo` decides as Dynamo's own selection service did (dynamo_decisions.jsonl)."""

import json
from pathlib import Path

from services.router.core.cost import Candidate, CostModel
from services.router.core.policies import Ask, PolicyName, make_policy

DECISIONS = Path(__file__).parent / "dynamo_decisions.jsonl"


def test_it_chooses_whom_dynamo_chose() -> None:
    policy = make_policy(PolicyName.DYNAMO, CostModel())
    _, *rows = map(json.loads, DECISIONS.read_text().splitlines())
    assert len(rows) > 100
    for row in rows:
        size, prompt = row["block_size"], row["prompt_tokens"]
        candidates = []
        for w in row["workers"]:
            cached = w["overlap_blocks"] * size
            # What it counts includes the request itself, at every worker.
            c = Candidate(w["worker"], prompt, g1_tokens=cached)
            c.queued_tokens = w["potential_prefill_tokens"] - (prompt - cached)
            c.active_blocks = w["potential_decode_blocks"]
            c.settle()
            assert c.queued_tokens >= 0
            candidates.append(c)
        costs = policy.costs(Ask(block_tokens=size), candidates)
        assert candidates[costs.index(min(costs))].slot == row["chosen"], row
