"""Writes tests/contract/dynamo_decisions.jsonl: decisions of NVIDIA Dynamo's own selection service.

    python -m benchmarks.router.golden

One line a decision: block size, prompt tokens, for each worker what it has of the prompt and what
it would have to do with it (as the rival counts), and whom the rival chose. Decisions that a
formula can't settle, because two workers are level, are left out.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from benchmarks.router.rival import VERSION, Feed, Rival

TARGET = Path(__file__).parents[2] / "tests" / "contract" / "dynamo_decisions.jsonl"
BLOCK_SIZE = 16
WORKERS = 4
DECISIONS = 120


def main() -> None:
    """Plays requests with shared prefixes to the rival and notes what it does."""
    rng = random.Random(7)
    prefixes = [[rng.randrange(32_000) for _ in range(BLOCK_SIZE * n)] for n in (4, 20, 40, 90)]
    rows: list[dict[str, object]] = []
    with Feed(WORKERS) as feed, Rival() as rival:
        rival.ask("workers", addresses=feed.addresses, block_size=BLOCK_SIZE)
        running: list[str] = []
        for number in range(DECISIONS * 2):
            prefix = rng.choice(prefixes)
            tail = [rng.randrange(32_000) for _ in range(rng.randrange(1, 400))]
            tokens = prefix[: rng.randrange(1, len(prefix))] + tail
            request = {"model_name": "m", "token_ids": tokens}
            scores = rival.ask("overlap", tokens=tokens)["scores"]["workers"]
            overlap = {w["worker_id"]: w["device_blocks"] for w in scores}
            loads = rival.ask("ask", method="potential_loads", request=request)["answer"]
            name = f"s{number}"
            chosen = rival.ask(
                "ask", method="select_and_reserve", request={**request, "selection_id": name}
            )["answer"]["worker_id"]
            running.append(name)
            costs = sorted(
                w["potential_prefill_tokens"] / BLOCK_SIZE + w["potential_decode_blocks"]
                for w in loads
            )
            if costs[1] - costs[0] > 1e-9 and len(rows) < DECISIONS:
                rows.append(
                    {
                        "block_size": BLOCK_SIZE,
                        "prompt_tokens": len(tokens),
                        "workers": [
                            {
                                "worker": w["worker_id"],
                                "overlap_blocks": overlap.get(w["worker_id"], 0),
                                "potential_prefill_tokens": w["potential_prefill_tokens"],
                                "potential_decode_blocks": w["potential_decode_blocks"],
                            }
                            for w in sorted(loads, key=lambda w: w["worker_id"])
                        ],
                        "chosen": chosen,
                    }
                )
            feed.stored(chosen, tokens, BLOCK_SIZE)
            time.sleep(0.02)
            if rng.random() < 0.5:
                rival.ask("ask", method="prefill_complete", request=rng.choice(running))
            if len(running) > 12:
                gone = running.pop(rng.randrange(len(running)))
                rival.ask("ask", method="free_reservation", request=gone)
    lines = [json.dumps({"source": f"ai-dynamo {VERSION}, SelectionService, default settings"})]
    lines += [json.dumps(row) for row in rows]
    TARGET.write_text("\n".join(lines) + "\n")
    print(f"{len(rows)} decisions written to {TARGET.name}")


if __name__ == "__main__":
    main()
