"""Blocks that simulated workers hold from their start on, for tests of scale.

They stand for documents of DOCUMENT_BLOCKS blocks, each held by COPIES workers with neighbouring
numbers. Their keys belong to no text: a router finds them by key, no prompt ever hits them.
"""

from __future__ import annotations

import hashlib

from services.common.ids import BlockKey

DOCUMENT_BLOCKS = 64
COPIES = 2


def document(number: int, blocks: int = DOCUMENT_BLOCKS) -> list[BlockKey]:
    """Keys of a document's first blocks, in chain order; the same everywhere."""
    raw = hashlib.shake_128(f"forebay document {number}".encode()).digest(8 * blocks)
    return [BlockKey(int.from_bytes(raw[i : i + 8], "big")) for i in range(0, len(raw), 8)]


def documents(worker: int, blocks: int) -> list[list[BlockKey]]:
    """What the worker of that number holds, `blocks` in all; the last document may be cut short."""
    each = -(-blocks // DOCUMENT_BLOCKS)
    first = worker * each // COPIES
    held = [document(first + i) for i in range(each)]
    if held:
        held[-1] = held[-1][: blocks - DOCUMENT_BLOCKS * (each - 1)]
    return held
