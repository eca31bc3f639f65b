"""What each tenant may hold of the pool and of the batch while others want some too, and who gives way."""

import math
from collections.abc import Collection, Mapping

from grpc import StatusCode

from prefixgate.cache.accounts import Account
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.fair_share import FairShare
from prefixgate.worker.request import RefusedError, Request


class Shares:
    """Compares what tenants have with their parts.

    A part of the pool is the tenant's floor and, of what no floor covers, as much as its weight among the active
    tenants says. The parts come to no more than there is: where one tenant has less than its part and the pool is
    short, another has more than its own, and that one gives way.

    One running call never does, so that whatever happens one call gets to its end: that of the tenant which has waited
    longest for an end, first in (priority, arrival). A priority says nothing about the calls of other tenants.
    """

    def __init__(
        self,
        cache: PrefixCache,
        fair: FairShare,
        calls: Collection[Request],
        running: Collection[Request],
        max_running: int,
    ) -> None:
        """``calls`` are the live ones in order of arrival, ``running`` those of them; both looked at when asked."""
        self._cache = cache
        self._fair = fair
        self._calls = calls
        self._running = running
        self._max_running = max_running

    def may_add(self, tenant: str, *, blocks: int, sequences: int) -> bool:
        """Whether a tenant that is given so much more stays within its part."""
        has_blocks = _had(self._account(tenant)) + blocks <= self._blocks(tenant)
        return has_blocks and self._used(tenant) + sequences <= self._sequences(tenant)

    def is_at_cap(self, tenant: str, blocks: int) -> bool:
        """Whether it is the tenant's own cap that keeps it from having so many blocks more."""
        account = self._account(tenant)
        return _had(account) + blocks > account.cap

    def pinned_out(self, tenant: str, blocks: int) -> RefusedError | None:
        """Return how a call ends that needs so many blocks more, where its tenant's pins leave too few below its cap.

        To be asked when no other call of the tenant runs: pins can last longer than a call should wait. None where they
        are not what it fails for.
        """
        account = self._account(tenant)
        too_many = _had(account) + blocks - account.cap
        if not 0 < too_many <= self._cache.pins.num_blocks_of(tenant):
            return None
        return RefusedError(
            StatusCode.RESOURCE_EXHAUSTED,
            f"the tenant's pins leave too little for this call of the {account.cap} blocks that it may hold: take some "
            "back, or try again when they have expired",
        )

    def can_free(self, asker: Request, *, blocks: int, sequences: int) -> bool:
        """Whether those that would make way for a waiting call have so much more than their parts."""
        first = self._first()
        spare_blocks = spare_sequences = 0
        for tenant in self._served_no_less(asker):
            kept_sequences = self._sequences(tenant)
            # What is pinned stays, whoever gives way.
            held = self._cache.pins.num_blocks_of(tenant)
            if first is not None and first.scope.tenant == tenant:
                held += self._num_unpinned(first)
                kept_sequences = max(kept_sequences, first.num_unfinished)
            spare_blocks += max(0, _had(self._account(tenant)) - max(self._blocks(tenant), held))
            spare_sequences += max(0, self._used(tenant) - kept_sequences)
        return blocks <= spare_blocks and sequences <= spare_sequences

    def makes_way(self, asker: Request, *, for_blocks: bool) -> Request | None:
        """The running call that is preempted for a waiting one that stays within its tenant's part.

        It is another tenant's that has more than its part, of blocks or else of sequences, and was served no less.
        """
        load = self._load_of_blocks if for_blocks else self._load_of_sequences
        loads = {tenant: load(tenant) for tenant in self._served_no_less(asker)}
        return self._last_of({tenant: load for tenant, load in loads.items() if load > 1})

    def gives_way(self, asker: Request) -> Request | None:
        """The running call that is preempted so that a running one can go on: the asker itself where it comes to that.

        None where the first call runs out and nobody has anything for it, which admission rules out.
        """
        tenant = asker.scope.tenant
        loads = {name: self._load_of_blocks(name, more=int(name == tenant)) for name in self._tenants()}
        if self.is_at_cap(tenant, 1):
            victim = self._last_of({tenant: 1.0})
        else:
            victim = self._last_of({name: load for name, load in loads.items() if load > 1})
        if victim is None and asker is not self._first():
            return asker
        if victim is None:
            yielding = {name: load for name, load in loads.items() if name == tenant or self._exceeds_floor(name)}
            victim = self._last_of(yielding)
        return victim

    def _tenants(self) -> set[str]:
        return {request.scope.tenant for request in self._running}

    def _served_no_less(self, asker: Request) -> set[str]:
        """The running tenants other than the asker's whose work is not behind its tenant's."""
        tenant = asker.scope.tenant
        mine = self._fair.clock(tenant)
        return {name for name in self._tenants() if name != tenant and self._fair.clock(name) >= mine}

    def _first(self) -> Request | None:
        """The running call that never gives way.

        Its tenant is that of the oldest live call, running or not, or else of the next oldest: preempting changes
        nothing about that, so that two calls cannot take this place from each other in turns.
        """
        tenants = self._tenants()
        tenant = next((call.scope.tenant for call in self._calls if call.scope.tenant in tenants), None)
        return min((call for call in self._running if call.scope.tenant == tenant), key=_rank, default=None)

    def _last_of(self, loads: Mapping[str, float]) -> Request | None:
        """The last running call in (priority, arrival) of the tenant with the largest of these loads.

        It is never the first of all, and a tenant with no other is passed over.
        """
        first = self._first()
        last: dict[str, Request] = {}
        for call in self._running:
            tenant = call.scope.tenant
            if tenant in loads and call is not first and (tenant not in last or call.rank > last[tenant].rank):
                last[tenant] = call
        return last[max(last, key=lambda tenant: (loads[tenant], last[tenant].rank[1]))] if last else None

    def _load_of_blocks(self, tenant: str, *, more: int = 0) -> float:
        """What a tenant has of blocks, over its part of them."""
        return _over(_had(self._account(tenant)) + more, self._blocks(tenant))

    def _load_of_sequences(self, tenant: str) -> float:
        return _over(self._used(tenant), self._sequences(tenant))

    def _exceeds_floor(self, tenant: str) -> bool:
        # Promises count: room is kept for them too, also where what is held stays within the floor.
        account = self._account(tenant)
        return account.held + account.promised > account.floor

    def _num_unpinned(self, call: Request) -> int:
        """Blocks of a call that no pin holds too; those that its outputs share count for each."""
        tables = [sequence.table for sequence in call.live if sequence.table]
        return sum(not self._cache.pins.count(block) for table in tables for block in table.block_ids)

    def _used(self, tenant: str) -> int:
        return sum(request.num_unfinished for request in self._running if request.scope.tenant == tenant)

    def _blocks(self, tenant: str) -> int:
        return self._cache.accounts.portion(tenant, self._fair.part(tenant))

    def _sequences(self, tenant: str) -> int:
        # One for each first, so that they come to no more than there are while there are enough for one each.
        spare = max(0, self._max_running - self._fair.num_active)
        return 1 + int(spare * self._fair.part(tenant))

    def _account(self, tenant: str) -> Account:
        return self._cache.accounts.view(tenant)


def _had(account: Account) -> int:
    """Blocks that the tenant's live calls hold or were promised."""
    return account.active + account.promised


def _over(has: int, part: int) -> float:
    if part:
        return has / part
    return math.inf if has else 0.0


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
