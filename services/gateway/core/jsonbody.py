"""A request body to a dict or a BadRequest: JSON as the standard has it, text that is text.

Python's parser takes NaN, Infinity, numbers beyond a float and lone surrogates; none of them may
reach a tokenizer, a protobuf or an answer, so all are found here, wherever in the body they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

from services.gateway.errors import BadRequest

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


def parse_object(body: bytes) -> dict[str, object]:
    """The object in `body`. Raises BadRequest, which never repeats what the body holds."""
    try:
        text = body.decode()
    except UnicodeDecodeError as exc:
        raise BadRequest(
            f"The request body is not valid UTF-8 (at byte {exc.start}).", code="invalid_json"
        ) from None
    not_finite = False

    def number(literal: str) -> float:
        nonlocal not_finite
        value = float(literal)
        not_finite = not_finite or not math.isfinite(value)
        return value

    try:
        value = json.loads(text, parse_float=number, parse_constant=number)
    except json.JSONDecodeError as exc:
        raise BadRequest(
            f"The request body is not valid JSON: {exc.msg} "
            f"(line {exc.lineno}, column {exc.colno}).",
            code="invalid_json",
        ) from None
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.", code="invalid_json") from None
    except ValueError:
        # Python refuses integers of more than 4,300 digits.
        raise BadRequest("A number in the body has too many digits.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("The request body must be a JSON object.", code="invalid_json")
    if not_finite or _SURROGATE_ESCAPE.search(body):
        _refuse_bad_leaves(value)
    return value


def _refuse_bad_leaves(root: dict[str, object]) -> None:
    for path, leaf in _leaves(root):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            raise BadRequest(
                f"Invalid value for '{path}': must be a finite number.",
                param=path,
                code="invalid_value",
            )
        if isinstance(leaf, str) and _SURROGATE.search(leaf):
            raise BadRequest(
                f"Invalid text in '{path}': a lone surrogate is not a character.",
                param=path,
                code="invalid_value",
            )


def _leaves(root: dict[str, object]) -> Iterator[tuple[str, object]]:
    """Every key and every scalar with its path; without recursion, since bodies may be deep."""
    stack: list[tuple[str, object]] = [("", root)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            for key, child in value.items():
                yield path or "body", key
                stack.append((child_path(path, key), child))
        elif isinstance(value, list):
            stack.extend((f"{path}[{i}]", child) for i, child in enumerate(value))
        else:
            yield path, value


def child_path(path: str, key: object) -> str:
    """`path` with one more step. Keys that look like no name of ours are not repeated."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    name = key if isinstance(key, str) and _PLAIN_KEY.fullmatch(key) else "*"
    return f"{path}.{name}" if path else name
