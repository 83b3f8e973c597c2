"""What waits to be sent to one caller: news merged by request, each request's share bounded.

A caller that reads slowly gets fewer, larger frames. A request whose share grows over the bound is
cut off, so that one slow reader costs bounded memory and nobody else waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.core.model import Delta, Failure, FinishReason, Handle, PositionLogprobs


@dataclass(slots=True)
class _Share:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int | None = None
    failure: Failure | None = None
    transfer: Handle | None = None
    transferred_tokens: int = 0
    cost: int = 0

    def add(self, delta: Delta) -> None:
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish = delta.finish
        self.stop_token_id = delta.stop_token_id
        self.failure = delta.failure
        self.transfer = delta.transfer
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
            self.transferred_tokens = delta.transferred_tokens
        self.cost += delta.cost

    def delta(self, request_id: str) -> Delta:
        return Delta(
            request_id,
            tuple(self.token_ids),
            tuple(self.logprobs),
            self.prompt_logprobs,
            self.finish,
            self.stop_token_id,
            self.cached_tokens,
            self.failure,
            self.transfer,
            self.transferred_tokens,
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """What is sent at once: the last step in it, and one delta for each request with news."""

    step: int
    deltas: tuple[Delta, ...]


class Backlog:
    """News not sent yet. `share_limit` bounds a request, `frame_limit` a frame (`Delta.cost`)."""

    def __init__(self, share_limit: int, frame_limit: int) -> None:
        self._share_limit = share_limit
        self._frame_limit = frame_limit
        self._shares: dict[str, _Share] = {}
        self._step = 0

    def push(self, step: int, delta: Delta) -> bool:
        """Adds news. False: the request's share is over its bound; it must be cut off (`cut`).

        A last delta is always taken: it adds no more than one step.
        """
        self._step = max(self._step, step)
        share = self._shares.setdefault(delta.request_id, _Share())
        if share.finish is not None:
            raise ValueError(f"news of request {delta.request_id} after its last delta")
        late = bool(share.cost)
        share.add(delta)
        return not late or delta.finish is not None or share.cost <= self._share_limit

    def cut(self, request_id: str, failure: Failure) -> None:
        """Ends a request's news here: what waits goes out, with `failure` as its end."""
        share = self._shares.setdefault(request_id, _Share())
        share.finish, share.failure, share.stop_token_id = FinishReason.ERROR, failure, None

    def take(self) -> Frame | None:
        """The next frame, oldest requests first; None when nothing waits."""
        if not self._shares:
            return None
        deltas: list[Delta] = []
        cost = 0
        for request_id in list(self._shares):
            if deltas and cost + self._shares[request_id].cost > self._frame_limit:
                break
            share = self._shares.pop(request_id)
            cost += share.cost
            deltas.append(share.delta(request_id))
        return Frame(self._step, tuple(deltas))

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._shares

    def __len__(self) -> int:
        return len(self._shares)
