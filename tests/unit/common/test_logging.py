"""Logs: one JSON object a line, with context, and no secret on any path into it."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from services.common.telemetry.logging import (
    REDACTED,
    bind_context,
    get_logger,
    redact,
    setup_logging,
)

KEY = "sk-Zm9vYmFyYmF6"
BEARER = f"Bearer {KEY}"


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


class Teller:
    """Shows its secret when it is turned into text."""

    def __repr__(self) -> str:
        return f"<request with {BEARER}>"


def test_a_line_is_a_json_object_with_service_level_time_and_context(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("toy")
    with bind_context(request_id="r-1"):
        get_logger("here").info("a thing happened", count=3)
    get_logger("here").info("outside")
    first, second = lines(capsys)
    assert first["event"] == "a thing happened" and first["count"] == 3
    assert (first["service"], first["level"], first["logger"]) == ("toy", "info", "here")
    assert first["request_id"] == "r-1" and "request_id" not in second
    assert first["timestamp"].endswith("Z")


def test_standard_library_loggers_come_out_alike(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("toy")
    with bind_context(request_id="r-1"):
        logging.getLogger("lib").warning("seen %d of %s", 3, "these", extra={"more": 1})
    (line,) = lines(capsys)
    assert line["event"] == "seen 3 of these" and line["more"] == 1
    assert (line["service"], line["request_id"]) == ("toy", "r-1")


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("toy", level="warning")
    get_logger("x").info("no")
    logging.getLogger("y").info("no")
    get_logger("x").warning("yes")
    assert [line["event"] for line in lines(capsys)] == ["yes"]


@pytest.mark.parametrize("fmt", ["json", "text"])
def test_secrets_never_reach_a_line(fmt: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("toy", level="debug", fmt=fmt)
    log = get_logger("x")
    log.debug(f"got {BEARER}")
    log.debug("headers", headers={"Authorization": BEARER, "x-api-key": KEY})
    log.debug("asgi", headers=[(b"authorization", BEARER.encode()), (b"cookie", KEY.encode())])
    log.debug("pair", header=("authorization", f"Token {KEY}"))
    log.debug("nested", a=[{"b": ({"etcd_password": KEY},)}])
    log.debug("object", request=Teller())
    log.debug("object inside", requests=[Teller(), {"r": Teller()}])
    log.debug("lower", auth=BEARER.lower())
    log.debug("basic", auth=f"Basic {KEY}")
    log.debug("url", endpoint=f"http://user:{KEY}@host:4317/")
    log.debug("positional %s", BEARER)
    logging.getLogger("lib").debug("request %r", {"authorization": BEARER})
    logging.getLogger("lib").debug("with extra", extra={"authorization": BEARER})
    with bind_context(token=KEY):
        log.debug("context")
    try:
        raise ValueError(f"bad header {BEARER}")
    except ValueError:
        log.exception("structlog")
        logging.getLogger("lib").exception("stdlib")
    written = capsys.readouterr().err
    assert "bad header" in written and "with extra" in written
    assert "Logging error" not in written
    assert KEY.lower() not in written.lower()
    assert KEY.encode().hex() not in written


def test_redaction_leaves_the_rest_alone() -> None:
    value = {"event": "x", "prompt_tokens": 5, "url": "http://h:1/p", "list": (1, "two"), "n": None}
    assert redact(value) == {**value, "list": [1, "two"]}
    assert redact({"token": "x"}) == {"token": REDACTED}
    assert redact(["authorization", "x", "y"]) == ["authorization", "x", "y"]
