"""The error tree: codes, reasons, and the way back from numbers."""

import grpc
import pytest

from services.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ForebayError,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
    error_class,
    error_from_number,
)

TREE = [
    (InvalidRequest, 3),
    (DeadlineExceeded, 4),
    (NotFound, 5),
    (Overloaded, 8),
    (FailedPrecondition, 9),
    (Internal, 13),
    (Unavailable, 14),
]


@pytest.mark.parametrize(("cls", "number"), TREE)
def test_numbers_lead_to_classes_and_back(cls: type[ForebayError], number: int) -> None:
    assert cls.code.value[0] == number
    assert error_class(cls.code) is cls
    error = error_from_number(number, "WHY", "words", field="f")
    assert type(error) is cls
    assert (error.reason, error.message, str(error)) == ("WHY", "words", "words")


@pytest.mark.parametrize("code", [grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNKNOWN])
def test_codes_without_a_class_are_internal(code: grpc.StatusCode) -> None:
    assert error_class(code) is Internal
    assert type(error_from_number(code.value[0], "", "x")) is Internal


def test_an_unknown_number_is_internal() -> None:
    assert type(error_from_number(99, "R", "x")) is Internal


def test_invalid_request_carries_its_field() -> None:
    error = InvalidRequest("too hot", field="temperature")
    assert (error.field, error.metadata) == ("temperature", {"field": "temperature"})
    from_number = error_from_number(3, "R", "x", field="top_p")
    assert isinstance(from_number, InvalidRequest) and from_number.field == "top_p"


def test_overloaded_carries_when_to_come_back() -> None:
    assert Overloaded("full", retry_after_s=1.5).metadata == {"retry_after_s": "1.500"}
    assert Overloaded("full").metadata == {}


def test_default_reasons_differ() -> None:
    assert len({cls("x").reason for cls, _ in TREE}) == len(TREE)
