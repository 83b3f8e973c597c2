"""Chat messages: JSON to checked messages.

Content may be text or a list of text parts. Parts of other kinds are known to OpenAI's clients but
not built here, and so are refused with "unsupported_parameter".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from services.gateway.errors import BadRequest, Unsupported

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_OTHER_MEDIA = frozenset(
    ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file")
)


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `content` is text, text parts, or None (assistant with tool calls only).

    `tool_calls` are OpenAI's objects: {"id", "type": "function", "function": {"name",
    "arguments"}}.
    """

    role: str
    content: str | tuple[str, ...] | None
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """The content as one text, parts joined by newlines; empty without content."""
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "\n".join(self.content)


def parse_messages(value: object) -> tuple[Message, ...]:
    """The messages of a chat body. Raises BadRequest with a path like "messages[2].content"."""
    if not isinstance(value, list):
        _invalid("messages", "must be a list of messages", "invalid_type")
    if not value:
        _invalid("messages", "must hold at least one message")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(value))


def _message(value: object, path: str) -> Message:
    if not isinstance(value, dict):
        _invalid(path, "must be an object", "invalid_type")
    role = value.get("role")
    if role is None:
        _missing(f"{path}.role")
    if not isinstance(role, str) or role not in ROLES:
        _invalid(f"{path}.role", f"must be one of {', '.join(ROLES)}")
    assistant = role == "assistant"
    content = _content(value.get("content"), f"{path}.content", assistant)
    tool_calls = _tool_calls(value, path) if assistant else ()
    reasoning = (
        _text(value, "reasoning_content", path) or _text(value, "reasoning", path)
        if assistant
        else None
    )
    if content is None and assistant:
        content = _text(value, "refusal", path)
    if content is None and not tool_calls and not reasoning:
        if "content" not in value:
            _missing(f"{path}.content")
        _invalid(
            f"{path}.content", "must be text or a list of text parts, not null", "invalid_type"
        )
    return Message(
        role,
        content,
        name=_text(value, "name", path),
        tool_calls=tool_calls,
        tool_call_id=_text(value, "tool_call_id", path),
        reasoning_content=reasoning,
    )


def _content(value: object, path: str, assistant: bool) -> str | tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        _invalid(path, "must be text or a list of text parts", "invalid_type")
    if not value:
        if assistant:
            return None
        _invalid(path, "must hold at least one part")
    return tuple(_part(part, f"{path}[{i}]", assistant) for i, part in enumerate(value))


def _part(value: object, path: str, assistant: bool) -> str:
    if not isinstance(value, dict):
        _invalid(path, "must be an object", "invalid_type")
    kind = value.get("type")
    if kind == "text":
        return _required_text(value, "text", path)
    if kind == "refusal" and assistant:
        return _required_text(value, "refusal", path)
    if isinstance(kind, str) and kind in _OTHER_MEDIA:
        raise Unsupported(
            f"Content parts of type '{kind}' are not supported yet; only text is.",
            param=f"{path}.type",
        )
    if kind is None:
        _missing(f"{path}.type")
    _invalid(f"{path}.type", "must be 'text'")


def _tool_calls(message: Mapping[str, object], path: str) -> tuple[dict[str, Any], ...]:
    calls = message.get("tool_calls")
    if calls is None:
        legacy = message.get("function_call")
        if legacy is None:
            return ()
        return ({"type": "function", "function": _function(legacy, f"{path}.function_call")},)
    if not isinstance(calls, list):
        _invalid(f"{path}.tool_calls", "must be a list", "invalid_type")
    return tuple(_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls))


def _tool_call(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _invalid(path, "must be an object", "invalid_type")
    kind = value.get("type", "function")
    if kind == "custom":
        raise Unsupported("Custom tool calls are not supported yet.", param=f"{path}.type")
    if kind != "function":
        _invalid(f"{path}.type", "must be 'function'")
    call: dict[str, Any] = {"type": "function"}
    if (call_id := _text(value, "id", path)) is not None:
        call["id"] = call_id
    call["function"] = _function(value.get("function"), f"{path}.function")
    return call


def _function(value: object, path: str) -> dict[str, Any]:
    if value is None:
        _missing(path)
    if not isinstance(value, dict):
        _invalid(path, "must be an object", "invalid_type")
    arguments = value.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        _invalid(f"{path}.arguments", "must be JSON text", "invalid_type")
    return {
        "name": _required_text(value, "name", path),
        "arguments": "{}" if arguments is None else arguments,
    }


def _text(value: Mapping[str, object], key: str, path: str) -> str | None:
    text = value.get(key)
    if text is not None and not isinstance(text, str):
        _invalid(f"{path}.{key}", "must be text", "invalid_type")
    return text


def _required_text(value: Mapping[str, object], key: str, path: str) -> str:
    text = _text(value, key, path)
    if text is None:
        _missing(f"{path}.{key}")
    return text


def _missing(param: str) -> NoReturn:
    raise BadRequest(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def _invalid(param: str, right: str, code: str = "invalid_value") -> NoReturn:
    raise BadRequest(f"Invalid value for '{param}': {right}.", param=param, code=code)


def with_roles(messages: Sequence[Message], old: str, new: str) -> list[Message]:
    """The messages with role `old` renamed to `new`."""
    return [
        Message(new, m.content, m.name, m.tool_calls, m.tool_call_id, m.reasoning_content)
        if m.role == old
        else m
        for m in messages
    ]
