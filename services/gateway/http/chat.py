"""Shapes of /v1/chat/completions: chunks of a stream, and the whole answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from services.gateway.core.choice import ChoiceDelta
from services.gateway.core.logprobs import LogprobEntry, chat_logprobs
from services.gateway.core.openai import ChatRequest
from services.gateway.core.usage import Usage
from services.gateway.pipeline import Generation, Update


class ChatChunks:
    """A chat's stream: the role first, then text, then a chunk with the finish reason for each
    choice.
    """

    def __init__(
        self, request: ChatRequest, generation: Generation, completion_id: str, created: int
    ) -> None:
        self._request = request
        self._generation = generation
        self._head: dict[str, Any] = {
            "id": completion_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
        }
        if request.include_usage:
            self._head["usage"] = None

    def opening(self) -> Iterable[object]:
        """The role of each choice."""
        for index in range(self._request.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def news(self, update: Update) -> Iterable[object]:
        """Text, if there is any, and the finish reason, if there is one."""
        delta = update.delta
        if delta.text or delta.logprobs:
            yield self._chunk(update.index, {"content": delta.text}, self._logprobs(delta.logprobs))
        if delta.finish_reason is not None:
            yield self._chunk(update.index, {}, finish_reason=delta.finish_reason)

    def usage(self, usage: Usage) -> object:
        """The last chunk."""
        return {**self._head, "choices": [], "usage": usage.to_dict()}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        tokenizer = self._generation.job.served.tokenizer
        return chat_logprobs(entries, tokenizer, self._request.top_logprobs or 0)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = {**self._head, "choices": [choice]}
        if self._request.continuous_usage:
            chunk["usage"] = self._generation.usage.to_dict()
        return chunk


def whole_chat(
    request: ChatRequest,
    generation: Generation,
    deltas: Sequence[Sequence[ChoiceDelta]],
    completion_id: str,
    created: int,
) -> dict[str, Any]:
    """The answer of a chat that was not streamed; `deltas` are those of each choice."""
    tokenizer = generation.job.served.tokenizer
    choices = []
    for index, pieces in enumerate(deltas):
        logprobs = None
        if request.logprobs:
            entries = [e for piece in pieces for e in piece.logprobs]
            logprobs = chat_logprobs(entries, tokenizer, request.top_logprobs or 0)
        choices.append(
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": "".join(piece.text for piece in pieces),
                    "refusal": None,
                },
                "logprobs": logprobs,
                "finish_reason": pieces[-1].finish_reason,
            }
        )
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": request.model,
        "choices": choices,
        "usage": generation.usage.to_dict(),
    }
