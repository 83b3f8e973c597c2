"""Claims without etcd: one holder for each job, by a clock that tests move."""

from collections.abc import Callable

from services.common.etcd.config import EtcdUnavailable


class FakeClaims:
    """Same methods as services.common.discovery.Discovery has for jobs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, tuple[str, float]] = {}
        self.away = False
        """etcd does not answer."""

    async def claim(self, job: str, who: str, ttl_s: float) -> bool:
        if self.away:
            raise EtcdUnavailable("etcd is away")
        holder, until = self._held.get(job, ("", 0.0))
        if holder not in ("", who) and until > self._clock():
            return False
        self._held[job] = who, self._clock() + ttl_s
        return True

    async def resign(self, job: str, who: str) -> None:
        if self.away:
            raise EtcdUnavailable("etcd is away")
        if self._held.get(job, ("", 0.0))[0] == who:
            del self._held[job]

    def steal(self, job: str, who: str, ttl_s: float) -> None:
        """Somebody else has it from now on."""
        self._held[job] = who, self._clock() + ttl_s
