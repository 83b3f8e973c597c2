"""What is remembered of a remote store: answers, for a while; and which run a block belongs to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

THERE_S = 60.0
ABSENT_S = 5.0
"""Short: another node may store the run at any time."""
_ENTRIES = 1 << 16


class Known:
    """Bounded, oldest out first. Keys are the hashes of runs' last blocks unless said otherwise."""

    def __init__(self, clock: Callable[[], float], entries: int = _ENTRIES) -> None:
        self._clock = clock
        self._entries = entries
        self._answers: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()
        self._runs: OrderedDict[bytes, bytes] = OrderedDict()

    def there(self, last: bytes) -> bool | None:
        """Whether the run is there; None: not known (any more)."""
        answer = self._answers.get(last)
        if answer is None or answer[1] <= self._clock():
            return None
        return answer[0]

    def learn(self, last: bytes, there: bool | None) -> None:
        """The store has, or hasn't, this run now; None: nobody knows any more."""
        self._answers.pop(last, None)
        if there is None:
            return
        self._answers[last] = (there, self._clock() + (THERE_S if there else ABSENT_S))
        if len(self._answers) > self._entries:
            self._answers.popitem(last=False)

    def seen(self, key: bytes) -> bool:
        """Whether a block was there when we last knew, however long ago that was."""
        last = self._runs.get(key)
        if last is None:
            return False
        answer = self._answers.get(last)
        return answer is None or answer[0]

    def learn_run(self, keys: Sequence[bytes]) -> None:
        """These blocks are one run."""
        for key in keys:
            self._runs.pop(key, None)
            self._runs[key] = keys[-1]
        while len(self._runs) > self._entries:
            self._runs.popitem(last=False)

    def run_of(self, key: bytes) -> bytes | None:
        """The last block of the run that holds `key`; None: not known."""
        return self._runs.get(key)
