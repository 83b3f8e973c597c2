"""The engine's cache salt: what keeps one tenant's KV blocks from another's."""

import hashlib


def effective_salt(tenant_salt: str = "", request_salt: str | None = None) -> str:
    """The salt that goes into the first block's hash.

    Empty when neither salt is given (blocks are shared by all who have none). Otherwise the hex
    SHA-256 of both, each with its length before it, so that no two different pairs ever meet and
    the engine never learns the salts themselves.
    """
    request_salt = request_salt or ""
    if not tenant_salt and not request_salt:
        return ""
    digest = hashlib.sha256(b"forebay cache salt 1")
    for part in (tenant_salt, request_salt):
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()
