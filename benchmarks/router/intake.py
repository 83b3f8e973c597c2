"""A core that takes events, in a process of its own: `python -m benchmarks.router.intake`.

Prints one line of JSON: CPU of decoding and applying, and resident memory, a block.
"""

from __future__ import annotations

import gc
import json
import sys
import time

from benchmarks.router.load import BATCH, chain_keys, envelopes, new_core, rss_bytes
from services.common.events.codec import decode


def measure(workers: int, chains: int, length: int, holders: int, batch: int) -> dict[str, float]:
    """Takes chains of `length` blocks, each held by so many workers."""
    core = new_core(workers, 16)
    keys = chain_keys(chains, length, seed=3)
    messages = []
    for holder in range(holders):
        # Another worker for each copy.
        messages += envelopes(keys[holder:] + keys[:holder], workers, batch)
    del keys
    core.apply(decode(envelopes(chain_keys(1, 8, seed=4), 1)[0]), 0.0)
    gc.collect()
    before, started = rss_bytes(), time.process_time()
    for message in messages:
        core.apply(decode(message), 0.0)
    spent = time.process_time() - started
    used = rss_bytes() - before
    entries = chains * length * holders
    return {
        "entries": entries,
        "event_us": spent / entries * 1e6,
        "blocks_per_cpu_s": entries / spent,
        "bytes_entry": used / entries,
    }


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    defaults = {"workers": 64, "chains": 1000, "length": 1000, "holders": 1, "batch": BATCH}
    print(json.dumps(measure(**{**defaults, **arguments})))
