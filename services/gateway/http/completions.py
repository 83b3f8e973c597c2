"""Shapes of /v1/completions: chunks of a stream, and the whole answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from services.gateway.core.choice import ChoiceDelta
from services.gateway.core.logprobs import LogprobEntry, completion_logprobs
from services.gateway.core.openai import CompletionRequest
from services.gateway.core.usage import Usage
from services.gateway.pipeline import Generation, Update


def _echoes(request: CompletionRequest, generation: Generation) -> list[str]:
    """What goes before each choice's text."""
    if not request.echo:
        return [""] * (len(request.prompt) * request.n)
    tokenizer = generation.job.served.tokenizer
    texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in request.prompt]
    return [text for text in texts for _ in range(request.n)]


class CompletionChunks:
    """A completion's stream: text, then a chunk with the finish reason for each choice."""

    def __init__(
        self, request: CompletionRequest, generation: Generation, completion_id: str, created: int
    ) -> None:
        self._request = request
        self._generation = generation
        self._head: dict[str, Any] = {
            "id": completion_id,
            "object": "text_completion",
            "created": created,
            "model": request.model,
        }
        if request.include_usage:
            self._head["usage"] = None

    def opening(self) -> Iterable[object]:
        """The prompts, when they are to be echoed."""
        for index, text in enumerate(_echoes(self._request, self._generation)):
            if text:
                yield self._chunk(index, text)

    def news(self, update: Update) -> Iterable[object]:
        """Text, if there is any, and the finish reason, if there is one."""
        delta = update.delta
        if delta.text or delta.logprobs:
            yield self._chunk(update.index, delta.text, self._logprobs(delta.logprobs))
        if delta.finish_reason is not None:
            yield self._chunk(update.index, "", finish_reason=delta.finish_reason)

    def usage(self, usage: Usage) -> object:
        """The last chunk."""
        return {**self._head, "choices": [], "usage": usage.to_dict()}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        tokenizer = self._generation.job.served.tokenizer
        return completion_logprobs(entries, tokenizer, self._request.logprobs)

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = {**self._head, "choices": [choice]}
        if self._request.continuous_usage:
            chunk["usage"] = self._generation.usage.to_dict()
        return chunk


def whole_completion(
    request: CompletionRequest,
    generation: Generation,
    deltas: Sequence[Sequence[ChoiceDelta]],
    completion_id: str,
    created: int,
) -> dict[str, Any]:
    """The answer of a completion that was not streamed; `deltas` are those of each choice."""
    tokenizer = generation.job.served.tokenizer
    echoes = _echoes(request, generation)
    choices = []
    for index, pieces in enumerate(deltas):
        logprobs = None
        if request.logprobs is not None:
            entries = [e for piece in pieces for e in piece.logprobs]
            logprobs = completion_logprobs(entries, tokenizer, request.logprobs)
        choices.append(
            {
                "index": index,
                "text": echoes[index] + "".join(piece.text for piece in pieces),
                "logprobs": logprobs,
                "finish_reason": pieces[-1].finish_reason,
            }
        )
    return {
        "id": completion_id,
        "object": "text_completion",
        "created": created,
        "model": request.model,
        "choices": choices,
        "usage": generation.usage.to_dict(),
    }
