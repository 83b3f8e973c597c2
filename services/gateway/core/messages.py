"""Chat messages: JSON to checked messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `content` is text, a tuple of text parts, or None (assistant with tool calls only)."""

    role: str
    content: str | tuple[str, ...] | None
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def parse_messages(value: object) -> tuple[Message, ...]:
    """The messages of a chat body. Raises BadRequest with a path like "messages[2].content"."""
    raise NotImplementedError
