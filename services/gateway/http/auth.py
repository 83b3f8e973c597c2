"""API keys: who a caller is. Without a key file everybody is welcome and nobody has a name."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ForebayError
from services.gateway.errors import NotAuthenticated

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class KeysUnreadable(ForebayError):
    """The key file can't be used; says where."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose account a request runs. `salt` keeps its cached blocks apart; empty: shared with
    all.
    """

    name: str = ""
    salt: str = ""


class ApiKeys:
    """The keys of a file, by digest: keys themselves are kept nowhere."""

    def __init__(self, tenants: Mapping[bytes, Tenant]) -> None:
        self._tenants = dict(tenants)

    def tenant(self, authorization: str) -> Tenant:
        """The tenant of an Authorization header. Raises NotAuthenticated."""
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise NotAuthenticated("Send your API key as Authorization: Bearer KEY.")
        tenant = self._tenants.get(hashlib.sha256(key.strip().encode("utf-8", "replace")).digest())
        if tenant is None:
            raise NotAuthenticated("This API key is not known.")
        return tenant


def load_keys(path: str) -> ApiKeys:
    """The keys in a TOML (`*.toml`) or JSON file. Raises KeysUnreadable, which never tells a key.

    Each entry is a key, or "sha256:" and the hex digest of one, to a tenant's name, or to a table
    of `tenant` and, optionally, `share_cache = true` for one whose blocks all others may share.
    """
    try:
        raw = Path(path).read_bytes()
        table: Any = tomllib.loads(raw.decode()) if path.endswith(".toml") else json.loads(raw)
    except OSError as exc:
        raise KeysUnreadable(f"api_keys_file {path!r} can't be read: {exc.strerror}") from exc
    except ValueError as exc:
        kind = "TOML" if path.endswith(".toml") else "JSON"
        raise KeysUnreadable(f"api_keys_file {path!r} is not {kind} in UTF-8") from exc
    if not isinstance(table, dict):
        raise KeysUnreadable(f"api_keys_file {path!r} must be a table of keys and tenants")
    tenants: dict[bytes, Tenant] = {}
    for number, (key, value) in enumerate(table.items(), 1):
        shared = False
        if isinstance(value, dict):
            shared = value.get("share_cache", False) is True
            value = value.get("tenant")
        if not isinstance(value, str) or not value or not key:
            raise KeysUnreadable(f"entry {number} of api_keys_file {path!r} names no tenant")
        known = _DIGEST.fullmatch(key)
        digest = bytes.fromhex(known.group(1)) if known else hashlib.sha256(key.encode()).digest()
        tenants[digest] = Tenant(value, "" if shared else value)
    return ApiKeys(tenants)
