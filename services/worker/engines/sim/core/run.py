"""A request inside the simulated engine, between its submission and its end."""

from __future__ import annotations

from services.worker.engines.sim.core.model import SimRequest


class Run:
    """A request between submission and end. No dataclass: it is in the innermost loops."""

    __slots__ = (
        "blocks",
        "cached",
        "computed",
        "ended",
        "limit",
        "loaded",
        "looked",
        "lower",
        "named",
        "order",
        "produced",
        "queued_s",
        "request",
        "submitted",
        "todo",
        "total",
        "transferred",
    )

    def __init__(self, request: SimRequest, order: tuple[int, int], now: float, limit: int) -> None:
        self.request = request
        self.order = order
        self.submitted = now
        self.limit = limit
        """Tokens at which it ends."""
        self.total = request.prompt_tokens
        """Prompt and output so far."""
        self.computed = 0
        self.produced = 0
        self.todo = 0
        """Tokens of the running step."""
        self.blocks: list[int] = []
        self.named = 0
        """Leading blocks that a prefix can hit."""
        self.looked = False
        """Whether the lower tier was asked since its last start."""
        self.loaded = 0
        """Leading blocks that a load has made ready."""
        self.lower = 0
        """Blocks that came up by its first start."""
        self.transferred: int | None = None
        """Tokens that come from another engine; None: no transfer has begun."""
        self.cached: int | None = None
        self.queued_s: float | None = None
        self.ended = False

    def __lt__(self, other: Run) -> bool:
        return self.order < other.order
