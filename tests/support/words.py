"""Text that never repeats by accident: prose of a seed, always the same."""

import pydoc_data.topics
import random

_WORDS = " ".join(text for _, text in sorted(pydoc_data.topics.topics.items())[:40]).split()


def prose(seed: int, words: int) -> str:
    """`words` words of English in an order of their own."""
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(words))
