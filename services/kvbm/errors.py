"""Errors of the daemon, as callers see them.

ForebayError (services/common/errors.py)
  NotFound            NAMESPACE_UNKNOWN, NOT_ATTACHED, LEASE_UNKNOWN, BLOCK_UNKNOWN
  FailedPrecondition  GEOMETRY_MISMATCH, NOT_LOCKED, PEERS_OFF
  Overloaded          NO_ROOM, PIN_LIMIT
"""

from services.common.errors import FailedPrecondition, NotFound, Overloaded


def namespace_unknown(namespace: bytes) -> NotFound:
    """No engine of this namespace has been here, and nothing of it is stored."""
    return NotFound(
        f"nothing is known of namespace {namespace.hex()[:16]}...", reason="NAMESPACE_UNKNOWN"
    )


def not_attached(owner: int) -> NotFound:
    """The owner is unknown: this daemon has started since, or declared it dead."""
    return NotFound(f"owner {owner:016x} is not attached; attach again", reason="NOT_ATTACHED")


def not_locked(owner: int) -> FailedPrecondition:
    """The owner does not hold its lock, so nothing would tell of its death."""
    return FailedPrecondition(f"owner {owner:016x} must lock its file first", reason="NOT_LOCKED")


def geometry_mismatch(ours: str, theirs: str) -> FailedPrecondition:
    """One namespace, two geometries: one of the two digests is wrong."""
    return FailedPrecondition(
        f"this namespace's blocks are {ours}, not {theirs}", reason="GEOMETRY_MISMATCH"
    )


def no_room(why: str) -> Overloaded:
    """The arena does not fit."""
    return Overloaded(why, reason="NO_ROOM")


def lease_unknown(lease: int) -> NotFound:
    """Expired, released, or another daemon's."""
    return NotFound(f"lease {lease:016x} is not held here", reason="LEASE_UNKNOWN")


def peers_off(why: str) -> FailedPrecondition:
    """This daemon exchanges no blocks with others."""
    return FailedPrecondition(f"no blocks for other nodes here: {why}", reason="PEERS_OFF")
