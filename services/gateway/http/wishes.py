"""Headers by which a client says where its request shall run."""

from __future__ import annotations

import re
from collections.abc import Mapping

from services.gateway.errors import BadRequest
from services.gateway.ports import NO_WISHES, Wishes

SESSION, WORKER = "x-session-id", "x-forebay-worker"
EXCLUDE, LABELS = "x-forebay-exclude", "x-forebay-labels"
_ANY = (SESSION, WORKER, EXCLUDE, LABELS)
_MOST_CHARS = 256
_MOST_LIST_CHARS = 4096
_RANK = re.compile(r"(.+)/([0-9]{1,4})")


def wishes_of(headers: Mapping[str, str]) -> Wishes:
    """The wishes in headers (names in lower case). Raises BadRequest; its param is the header."""
    if not any(name in headers for name in _ANY):
        return NO_WISHES
    for name in _ANY:
        most = _MOST_CHARS if name in (SESSION, WORKER) else _MOST_LIST_CHARS
        if len(headers.get(name, "")) > most:
            raise BadRequest(f"Header {name}: at most {most} characters.", param=name)
    worker, rank = headers.get(WORKER, "").strip(), None
    if ranked := _RANK.fullmatch(worker):
        worker, rank = ranked[1], int(ranked[2])
    labels = {}
    for pair in _list(headers, LABELS):
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise BadRequest(f"Header {LABELS}: give NAME=VALUE,...", param=LABELS)
        labels[name.strip()] = value.strip()
    excluded = frozenset(_list(headers, EXCLUDE))
    return Wishes(worker, rank, excluded, labels, headers.get(SESSION, "").strip())


def _list(headers: Mapping[str, str], name: str) -> list[str]:
    return [part.strip() for part in headers.get(name, "").split(",") if part.strip()]
