"""The policy `dynamo` decides as NVIDIA Dynamo's own selection service did.

dynamo_decisions.jsonl holds its decisions (benchmarks/router/golden.py took them): for each worker
what it would have to do with the request, as the service counts, and whom it chose.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from services.router.core.cost import Candidate, CostModel
from services.router.core.policies import Ask, PolicyName, make_policy

LINES = (Path(__file__).with_name("dynamo_decisions.jsonl")).read_text().splitlines()
ROWS = [json.loads(line) for line in LINES[1:]]


def candidate(row: dict[str, Any], worker: dict[str, Any]) -> Candidate:
    cached = worker["overlap_blocks"] * row["block_size"]
    own = row["prompt_tokens"] - cached
    c = Candidate(
        worker["worker"],
        prompt_tokens=row["prompt_tokens"],
        g1_tokens=cached,
        queued_requests=1,
        queued_tokens=worker["potential_prefill_tokens"] - own,
        active_blocks=worker["potential_decode_blocks"],
    )
    c.settle()
    return c


def choices(weight: float) -> int:
    policy = make_policy(PolicyName.DYNAMO, CostModel(), weight)
    agreed = 0
    for row in ROWS:
        candidates = [candidate(row, worker) for worker in row["workers"]]
        costs = policy.costs(Ask(block_tokens=row["block_size"]), candidates)
        agreed += candidates[costs.index(min(costs))].slot == row["chosen"]
    return agreed


def test_every_decision_is_the_same() -> None:
    assert len(ROWS) == 120
    assert json.loads(LINES[0])["source"].startswith("ai-dynamo")
    assert choices(1.0) == len(ROWS)


@pytest.mark.parametrize("weight", [0.0, 4.0])
def test_another_weight_would_show(weight: float) -> None:
    assert choices(weight) < len(ROWS)
