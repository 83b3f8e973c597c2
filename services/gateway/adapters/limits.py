"""The process's limit on open files: each client and each stream is one."""

import resource

from services.common.telemetry.logging import get_logger

log = get_logger(__name__)

_SPARE = 256


def raise_file_limit(connections: int) -> int:
    """Raises the soft limit to the hard one; warns when `connections` clients don't fit. Returns
    the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as exc:
            log.warning("limit on open files not raised", limit=soft, why=str(exc))
    if soft != resource.RLIM_INFINITY and soft < connections + _SPARE:
        log.warning(
            "limit on open files is too low: clients are refused before max_in_flight is reached",
            limit=soft,
            max_in_flight=connections,
            wanted=connections + _SPARE,
        )
    return soft
