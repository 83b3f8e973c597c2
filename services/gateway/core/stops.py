"""Stop strings over a stream of text: found wherever they fall, never shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream of text at the first stop string that is completed."""

    def __init__(self, stops: Sequence[str], include_stop_str: bool = False) -> None: ...

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown now."""
        raise NotImplementedError

    def flush(self) -> str:
        """What was held back, when the stream ended without a stop."""
        raise NotImplementedError
