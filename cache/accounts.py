"""What each tenant holds of the pool, and what it may.

A tenant's *floor* is its own: blocks that it holds up to there are never evicted for others, and room for what is
missing up to there is kept. Its *cap* bounds what it holds, cached blocks included. Both are in blocks. A tenant
without a configured share has no floor and may use what the floors of others leave.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantShare:
    """A tenant's part of the pool, in blocks."""

    floor: int = 0
    cap: int | None = None
    pin_cap: int | None = None
    """Most blocks that its pins hold; None is what the pins of all may hold."""


@dataclass(eq=False, slots=True)
class Account:
    """One tenant's blocks, counted as they change, so reading them is O(1).

    Written by ``BlockPool`` (active, cached) and by the cache's reservations (promised), read by anyone.
    """

    tenant: str
    floor: int
    cap: int
    pin_cap: int | None = None
    number: int = 0
    """Its own among the accounts of one pool, from 1 on: short for the tenant, see ``BlockPool.owners``."""
    active: int = 0
    cached: int = 0
    promised: int = 0
    """Blocks that admitted calls were promised and have not taken."""

    @property
    def held(self) -> int:
        return self.active + self.cached

    @property
    def evictable(self) -> int:
        """Cached blocks that other tenants may have."""
        return max(0, min(self.cached, self.held - self.floor))

    @property
    def missing(self) -> int:
        """Blocks up to the floor that are neither held nor promised, for which room is kept."""
        return max(0, self.floor - self.held - self.promised)


class Accounts:
    """The accounts of all tenants of one pool."""

    def __init__(self, num_blocks: int, shares: Mapping[str, TenantShare], *, pin_limit: int = 0) -> None:
        """Raises ValueError where the floors and the pins together leave nothing, with the numbers."""
        floors = sum(share.floor for share in shares.values())
        if floors + pin_limit >= num_blocks:
            raise ValueError(
                f"the tenants' floors ({floors} blocks) and the pin limit ({pin_limit} blocks) must leave part of the "
                f"pool ({num_blocks} blocks) to share"
            )
        for tenant, share in shares.items():
            if share.floor < 0 or (share.cap is not None and share.cap < max(1, share.floor)):
                raise ValueError(f"tenant {tenant}: floor {share.floor} and cap {share.cap} contradict each other")
        self._num_blocks = num_blocks
        self._shares = dict(shares)
        self._accounts: dict[str, Account] = {}
        self._numbers = itertools.count(1)
        self.total_promised = 0
        self._unshared = num_blocks - pin_limit - floors
        self._floored = [self.of(tenant) for tenant, share in shares.items() if share.floor]

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def of(self, tenant: str) -> Account:
        """The tenant's account, opened where there is none."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = self._opened(tenant)
            account.number = next(self._numbers)
        return account

    def find(self, tenant: str) -> Account | None:
        """The tenant's account, where it is open. May be asked from any thread."""
        return self._accounts.get(tenant)

    def view(self, tenant: str) -> Account:
        """The tenant's account to be read only; an empty one that is not kept where there is none."""
        return self._accounts.get(tenant) or self._opened(tenant)

    def portion(self, tenant: str, part: float) -> int:
        """A tenant's share where the pool is short: its floor and a part of what no floor covers, up to its cap."""
        account = self.view(tenant)
        return min(account.cap, account.floor + int(self._unshared * part))

    def _opened(self, tenant: str) -> Account:
        share = self._shares.get(tenant, TenantShare())
        cap = self._num_blocks if share.cap is None else share.cap
        return Account(tenant, share.floor, cap, pin_cap=share.pin_cap)

    def forget_empty(self, account: Account) -> None:
        """Close the account of a tenant that was not configured and holds nothing.

        An account that was closed before may be given; another of the same tenant is none of its business.
        """
        empty = not (account.active or account.cached or account.promised)
        if empty and account.tenant not in self._shares and self._accounts.get(account.tenant) is account:
            del self._accounts[account.tenant]

    def ceiling(self, tenant: str) -> int:
        """The most blocks that one call of the tenant can ever hold."""
        share = self._shares.get(tenant, TenantShare())
        return min(self._num_blocks if share.cap is None else share.cap, self._unshared + share.floor)

    def room(self, account: Account, *, free: int, cached: int) -> int:
        """Blocks that the tenant could take now: free and evictable ones, less what others are owed.

        ``free`` and ``cached`` are the pool's counts. Only tenants with a floor need to be looked at one by one.
        """
        owed = sum(other.cached - other.evictable + other.missing for other in self._floored if other is not account)
        shared = free + cached - owed - self.total_promised
        return min(shared, account.cap - account.active - account.promised)

    def promise(self, account: Account, blocks: int) -> None:
        account.promised += blocks
        self.total_promised += blocks

    def settle(self, account: Account, blocks: int) -> None:
        """Take back a promise: the blocks were taken, or are not needed."""
        account.promised -= blocks
        self.total_promised -= blocks
