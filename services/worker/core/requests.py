"""Who runs: the book of requests the engine has, and the lifecycle events that follow.

Each admitted request gets exactly one RequestFinished, and a RequestFirstToken before it when it
produced a token. Counts are the engine's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.events.model import (
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    RunningRequest,
)
from services.common.ids import AttemptId, BlockKey

Lifecycle = RequestAdmitted | RequestFirstToken | RequestFinished


@dataclass(slots=True)
class _Entry:
    admitted: RequestAdmitted
    transfer_tokens: int
    """Still to come from a prefill worker."""
    decoding: bool = False
    cached_tokens: int = 0
    output_tokens: int = 0


class RequestBook:
    """The requests between their admission and their end, by the engine's id."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self.admitted = 0
        self.finished = 0

    def admit(
        self,
        id: str,
        attempt_id: AttemptId,
        prompt_tokens: int,
        max_new_tokens: int,
        keys: Sequence[BlockKey],
        dp_rank: int = 0,
        transfer_tokens: int = 0,
        prefill_only: bool = False,
    ) -> RequestAdmitted:
        """Enters a request. Raises ValueError when `id` is in the book.

        `transfer_tokens` are to come from a prefill worker instead of being computed.
        """
        if id in self._entries:
            raise ValueError(f"request {id} is already admitted")
        event = RequestAdmitted(
            attempt_id,
            prompt_tokens,
            max_new_tokens,
            keys,
            dp_rank,
            transfer_tokens,
            prefill_only,
        )
        self._entries[id] = _Entry(event, transfer_tokens)
        self.admitted += 1
        return event

    def advance(
        self,
        id: str,
        new_tokens: int,
        cached_tokens: int | None,
        *,
        finished: bool,
        aborted: bool = False,
        transferred_tokens: int = 0,
    ) -> list[Lifecycle]:
        """Takes news of a request; returns the events that follow, none for an unknown request."""
        entry = self._entries.get(id)
        if entry is None:
            return []
        events: list[Lifecycle] = []
        attempt, rank = entry.admitted.attempt_id, entry.admitted.dp_rank
        if cached_tokens is not None:
            entry.cached_tokens = cached_tokens
        entry.output_tokens += new_tokens
        if new_tokens and not entry.decoding:
            entry.decoding = True
            events.append(RequestFirstToken(attempt, entry.cached_tokens, rank, transferred_tokens))
        if finished:
            del self._entries[id]
            self.finished += 1
            events.append(
                RequestFinished(attempt, entry.cached_tokens, entry.output_tokens, aborted, rank)
            )
        return events

    def untransferred(self, id: str) -> None:
        """What was to come from a prefill worker does not; it is computed."""
        entry = self._entries.get(id)
        if entry is not None:
            entry.transfer_tokens = 0

    def ids(self) -> tuple[str, ...]:
        """Ids of all requests in the book."""
        return tuple(self._entries)

    def requests(self) -> tuple[RunningRequest, ...]:
        """All requests in the book, for a snapshot."""
        return tuple(RunningRequest(e.admitted, e.decoding) for e in self._entries.values())

    def pending_prefill_tokens(self) -> int:
        """Prompt tokens of requests without a first token: at most so many are to be computed."""
        return sum(
            e.admitted.prompt_tokens - e.transfer_tokens
            for e in self._entries.values()
            if not e.decoding
        )

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, id: object) -> bool:
        return id in self._entries

    def check_invariants(self) -> None:
        """Raises AssertionError when the book contradicts itself."""
        assert self.admitted - self.finished == len(self._entries), "an end is missing or double"
        for entry in self._entries.values():
            assert entry.decoding == (entry.output_tokens > 0), "first token and count disagree"
