"""Structured logs on stderr: one JSON object a line (or text), context ids, no secrets."""

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

_SECRET_KEYS = re.compile(
    r"authorization|password|secret|api[-_]?key|cookie|(^|_)token$", re.IGNORECASE
)
_BEARER = re.compile(r"(?i)\b((?:bearer|basic)\s+|sk-)[A-Za-z0-9._~+/=-]{4,}")
_URL_PASSWORD = re.compile(r"(://[^/\s:@\"]*:)[^/\s@\"]+@")
REDACTED = "[redacted]"


def redact(value: Any) -> Any:
    """`value` without secrets: values of secret keys, bearer tokens and API keys inside strings."""
    if isinstance(value, str):
        value = _BEARER.sub(rf"\1{REDACTED}", value)
        return _URL_PASSWORD.sub(rf"\1{REDACTED}@", value)
    if isinstance(value, bytes):
        return redact(value.decode(errors="replace"))
    if isinstance(value, Mapping):
        return {
            k: REDACTED if isinstance(k, str) and _secret(k) else redact(v)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        if len(value) == 2 and isinstance(value[0], str | bytes) and _secret(redact(value[0])):
            # A header, as gRPC metadata and ASGI have them.
            return [redact(value[0]), REDACTED]
        return [redact(v) for v in value]
    return value


def _secret(key: str) -> bool:
    return _SECRET_KEYS.search(key) is not None


def _redact_line(_: Any, __: str, line: Any) -> str:
    """What only shows when values are turned into text, such as an object's repr."""
    text: str = redact(line)
    return text


def _redact_event(_: Any, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    return dict(redact(event))


def setup_logging(service: str, *, level: str = "info", fmt: str = "json") -> None:
    """Configures structlog and the standard library's logging alike. Call once, first thing."""
    numeric = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _redact_event,
    ]
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if fmt == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            # The default one shows local variables, and with them prompts and keys.
            exception_formatter=structlog.dev.plain_traceback,
        )
    )

    def add_service(_: Any, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        event.setdefault("service", service)
        return event

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                add_service,
                renderer,
                _redact_line,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(numeric)
    # They tell at debug level what their own developers want to know.
    for noisy in ("asyncio", "grpc", "grpc._cython"):
        logging.getLogger(noisy).setLevel(max(numeric, logging.INFO))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger: `log.info("event words", key=value)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


bind_context = structlog.contextvars.bound_contextvars
"""`with bind_context(request_id=...)`: adds keys to every line logged inside."""
