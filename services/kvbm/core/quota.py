"""Quota book: how many bytes each tenant may keep in each tier, and how many it does.

One book for all namespaces of a daemon, so that a tenant with two models has one quota. It only
counts: whose blocks go to make room is for the catalog to say.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.common.events.model import Tier


class QuotaError(ValueError):
    """A booking would take a tenant below zero or beyond its quota: a bug of the caller."""


class QuotaBook:
    """Bytes by tenant and tier. Tenants are `tenant_id` numbers; 0, nobody, has no quota.

    `limits` maps (tenant, tier) to bytes; the tenant None stands for each other tenant by itself.
    A pair that is not in it has no limit; a limit of 0 keeps the tenant out of the tier.
    """

    def __init__(self, limits: Mapping[tuple[int | None, Tier], int]) -> None:
        for (tenant, tier), limit in limits.items():
            if limit < 0:
                raise ValueError(f"quota of tenant {tenant} in {tier.name} is {limit}, below 0")
        self._limits = dict(limits)
        self._use: dict[tuple[int, Tier], int] = {}

    def limit(self, tenant: int, tier: Tier) -> int | None:
        """Most bytes the tenant may keep there; None: as many as fit."""
        if tenant == 0:
            return None
        own = self._limits.get((tenant, tier))
        return self._limits.get((None, tier)) if own is None else own

    def used(self, tenant: int, tier: Tier) -> int:
        """Bytes the tenant keeps there now."""
        return self._use.get((tenant, tier), 0)

    def room(self, tenant: int, tier: Tier, bytes: int) -> bool:
        """Whether so many bytes more fit its quota."""
        limit = self.limit(tenant, tier)
        return limit is None or self.used(tenant, tier) + bytes <= limit

    def charge(self, tenant: int, tier: Tier, bytes: int, *, force: bool = False) -> None:
        """Books bytes. Raises QuotaError beyond the quota, unless forced.

        Adopted blocks are charged by force: a quota that was lowered while the daemon was away is
        met by eviction, not by throwing everything away.
        """
        if bytes < 0:
            raise QuotaError(f"a charge of {bytes} bytes")
        if not force and not self.room(tenant, tier, bytes):
            raise QuotaError(f"tenant {tenant:#x} has no room for {bytes} bytes in {tier.name}")
        if bytes:
            self._use[tenant, tier] = self.used(tenant, tier) + bytes

    def refund(self, tenant: int, tier: Tier, bytes: int) -> None:
        """Takes a charge back. Raises QuotaError for more than was charged."""
        left = self.used(tenant, tier) - bytes
        if bytes < 0 or left < 0:
            raise QuotaError(f"a refund of {bytes} bytes leaves tenant {tenant:#x} with {left}")
        if left:
            self._use[tenant, tier] = left
        else:
            self._use.pop((tenant, tier), None)

    def over(self, tenant: int, tier: Tier) -> int:
        """Bytes beyond the quota, as after adoption under a lower one."""
        limit = self.limit(tenant, tier)
        return 0 if limit is None else max(0, self.used(tenant, tier) - limit)

    def use(self) -> Mapping[tuple[int, Tier], int]:
        """Bytes by tenant and tier, without zeros."""
        return dict(self._use)

    def check_invariants(self) -> None:
        """Raises AssertionError when a count is not above zero."""
        assert all(count > 0 for count in self._use.values()), self._use
