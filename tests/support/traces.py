"""Small traces with prefixes to share, from a seed: conversations, some with a system prompt."""

import json
import random
from pathlib import Path

from services.router.replay.trace import BLOCK_TOKENS, TraceRequest, numbered


def made_trace(
    seed: int, *, sessions: int = 120, agents: int = 6, seconds: float = 120.0
) -> list[TraceRequest]:
    """Sessions of some turns; each begins with one of `agents` system prompts or with none."""
    dice = random.Random(seed)
    ids = iter(range(1, 1 << 30))
    systems = [[next(ids) for _ in range(dice.randrange(2, 12))] for _ in range(agents)]
    requests: list[TraceRequest] = []
    for _ in range(sessions):
        weights = [1 / (i + 1) for i in range(agents)]
        head = dice.choices(systems, weights)[0] if agents and dice.random() < 0.6 else []
        chain, tokens = list(head), len(head) * BLOCK_TOKENS
        when = dice.uniform(0, seconds)
        for _ in range(dice.randrange(1, 7)):
            tokens += int(dice.lognormvariate(6.8, 1.0)) + 20
            while len(chain) < tokens // BLOCK_TOKENS:
                chain.append(next(ids))
            output = dice.randrange(1, 300)
            partial = [next(ids)] if tokens % BLOCK_TOKENS else []
            requests.append(TraceRequest(0, when, tokens, output, (*chain, *partial)))
            tokens += output
            when += output * 0.02 + dice.expovariate(1 / 12)
    return numbered(requests)


def write_trace(requests: list[TraceRequest], path: Path) -> Path:
    """The same as a file in Mooncake's form."""
    rows = [
        {
            "timestamp": round(r.arrival_s * 1000),
            "input_length": r.input_tokens,
            "output_length": r.output_tokens,
            "hash_ids": list(r.blocks),
        }
        for r in requests
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
