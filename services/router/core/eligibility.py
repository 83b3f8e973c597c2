"""Constraints: which workers may take a request at all, and how to say that none may."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.router.core.answers import Bar, Query, Refusal, RefusalKind
from services.router.core.lives import Status
from services.router.core.workers import WorkerInfo


def has_own_workers(query: Query, workers: Iterable[WorkerInfo]) -> bool:
    """Whether some worker of the model is reserved for the request's tenant."""
    return any(query.tenant in w.tenants and w.serves(query.model) for w in workers)


def bar_of(info: WorkerInfo, status: Status, query: Query, own: bool = False) -> Bar | None:
    """Why a worker can't take a request; None if it can. Silence and a role alone are no bar.

    `own`: what `has_own_workers` says.
    """
    if not info.serves(query.model):
        return Bar.OTHER_MODEL
    if query.pinned and info.id != query.pinned:
        return Bar.NOT_PINNED
    if query.rank is not None and query.rank >= max(1, info.dp_size):
        return Bar.OTHER_RANK
    if info.tenants:
        if query.tenant not in info.tenants:
            return Bar.OTHER_TENANTS
    elif own:
        return Bar.NOT_RESERVED
    if info.id in query.excluded:
        return Bar.EXCLUDED
    if query.labels and any(info.labels.get(k) != v for k, v in query.labels.items()):
        return Bar.LABELS
    if query.block_size and info.block_size != query.block_size:
        return Bar.OTHER_BLOCK_SIZE
    if info.max_model_len and query.prompt_tokens > info.max_model_len:
        return Bar.TOO_LONG
    if status is Status.DRAINING:
        return Bar.DRAINING
    if status is Status.UNREACHABLE:
        return Bar.UNREACHABLE
    return None


def refusal(
    query: Query, bars: set[Bar], workers: Sequence[WorkerInfo], known: bool, synced: bool
) -> Refusal:
    """What to say when every worker has one of `bars`.

    `known`: the model has, or lately had, a worker; `synced`: all records have been read once.
    """
    name = query.model
    if not known:
        if synced:
            return Refusal(RefusalKind.MODEL_NOT_FOUND, f"no worker serves the model {name!r}")
        return Refusal(
            RefusalKind.NO_WORKER,
            f"no worker for {name!r} is known yet; discovery has not been read",
        )
    reasons = bars - {Bar.OTHER_MODEL}
    # Whose workers they are is no reason, as long as others are there.
    reasons = reasons - {Bar.OTHER_TENANTS, Bar.NOT_RESERVED} or reasons
    mine = [w for w in workers if w.serves(name)]
    own = [w for w in mine if query.tenant in w.tenants]
    mine = own or [w for w in mine if not w.tenants]
    if reasons == {Bar.OTHER_BLOCK_SIZE}:
        sizes = ", ".join(map(str, sorted({w.block_size for w in mine})))
        return Refusal(
            RefusalKind.WRONG_BLOCK_SIZE,
            f"workers of {name!r} have blocks of {sizes} tokens, not {query.block_size}",
        )
    if reasons == {Bar.TOO_LONG}:
        most = max(w.max_model_len for w in mine)
        return Refusal(
            RefusalKind.PROMPT_TOO_LONG,
            f"the prompt has {query.prompt_tokens} tokens, {name!r} takes {most}",
        )
    why = "; ".join(sorted(reasons)) or "none is alive"
    return Refusal(RefusalKind.NO_WORKER, f"no worker can take {name!r} now ({why})")
