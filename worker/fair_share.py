"""How much each tenant was served, and what its part is of what there is to share.

Each tenant has a clock that its work moves on, the slower the larger its weight. Who is behind goes first. A tenant
that comes anew starts where the one furthest behind stands, so that nobody saves up turns by staying away.
"""

from collections.abc import Mapping

DEFAULT_WEIGHT = 1.0
_SPARE = 64


class FairShare:
    """The clocks and weights of the tenants. Those with live calls are called active."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._clocks: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._total_weight = 0.0
        self._away: dict[str, float] = {}
        """Clocks of tenants that went away ahead of others, so that coming back does not set them back."""
        self._prune_at = _SPARE

    def enter(self, tenant: str) -> None:
        """A call of the tenant came."""
        calls = self._calls.get(tenant, 0)
        self._calls[tenant] = calls + 1
        if not calls:
            behind = min(self._clocks.values(), default=0.0)
            self._clocks[tenant] = max(behind, self._away.pop(tenant, 0.0))
            self._total_weight += self.weight(tenant)

    def leave(self, tenant: str) -> None:
        """A call of the tenant ended."""
        self._calls[tenant] -= 1
        if self._calls[tenant]:
            return
        del self._calls[tenant]
        self._away[tenant] = self._clocks.pop(tenant)
        # Summed anew, as what is added and taken away again would leave a rest.
        self._total_weight = sum(map(self.weight, self._clocks))
        if not self._clocks:
            self._away.clear()
        elif len(self._away) > self._prune_at:
            behind = min(self._clocks.values())
            self._away = {name: clock for name, clock in self._away.items() if clock > behind}
            self._prune_at = 2 * len(self._away) + _SPARE

    def charge(self, tenant: str, tokens: int) -> None:
        """The tenant gets so many tokens computed; a negative number takes back what it did not get after all."""
        self._clocks[tenant] += tokens / self.weight(tenant)

    def clock(self, tenant: str) -> float:
        """Tokens that an active tenant got, divided by its weight, from a common beginning."""
        return self._clocks[tenant]

    def part(self, tenant: str) -> float:
        """An active tenant's weight as a share of that of all active ones."""
        return self.weight(tenant) / self._total_weight

    def weight(self, tenant: str) -> float:
        """The tenant's weight, whether it is active or not."""
        return self._weights.get(tenant, DEFAULT_WEIGHT)

    @property
    def num_active(self) -> int:
        """Tenants with live calls."""
        return len(self._clocks)
