"""Key files: read, refused with the place at fault, and never told."""

import hashlib
import json
from pathlib import Path

import pytest

from services.gateway.errors import NotAuthenticated
from services.gateway.http.auth import KeysUnreadable, Tenant, load_keys


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_toml_and_json(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-b").hexdigest()
    toml = f'"sk-a" = "one"\n"sha256:{digest}" = {{tenant = "two", share_cache = true}}\n'
    as_json = json.dumps(
        {"sk-a": "one", f"sha256:{digest}": {"tenant": "two", "share_cache": True}}
    )
    for keys in (
        load_keys(write(tmp_path / "k.toml", toml)),
        load_keys(write(tmp_path / "k.json", as_json)),
    ):
        assert keys.tenant("Bearer sk-a") == Tenant("one", "one")
        assert keys.tenant("bearer  sk-b ") == Tenant("two", "")
        for wrong in (
            "",
            "sk-a",
            "Bearer",
            "Bearer ",
            "Basic sk-a",
            "Bearer sk-c",
            f"Bearer {digest}",
        ):
            with pytest.raises(NotAuthenticated):
                keys.tenant(wrong)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"sk-secret": 3}', '{"sk-secret": ""}', '{"": "t"}', '{"sk-secret": {}}']
)
def test_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(KeysUnreadable) as failure:
        load_keys(write(tmp_path / "k.json", text))
    assert "sk-secret" not in str(failure.value) and "k.json" in str(failure.value)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(KeysUnreadable, match="No such file"):
        load_keys(str(tmp_path / "none.toml"))
