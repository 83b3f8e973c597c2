"""The one shape of errors, checked."""

import httpx

from tests.support.client import Json


def openai_error(response: httpx.Response) -> Json:
    """The error of a response, which must be JSON in OpenAI's shape and nothing else."""
    kind = response.headers["content-type"].split(";")[0]
    assert kind == "application/json", f"{response.status_code} with {kind}: {response.text[:300]}"
    body = response.json()
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"], error
    assert isinstance(error["type"], str) and error["type"], error
    assert error["param"] is None or isinstance(error["param"], str), error
    assert error["code"] is None or isinstance(error["code"], str), error
    return dict(error)
