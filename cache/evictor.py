"""Makes cached blocks free: for whom, whose, and in which order."""

from collections.abc import Callable, Sequence
from math import inf

from prefixgate.cache.accounts import Account
from prefixgate.cache.block_pool import BlockPool
from prefixgate.cache.events import EventLog
from prefixgate.cache.evicted_hashes import EvictedHashes
from prefixgate.cache.eviction import EvictionPolicy, EvictionQueue
from prefixgate.cache.idle_times import IdleTimes
from prefixgate.cache.prefix_index import NONE, PrefixIndex

DEFAULT_RETENTION = 50
"""Retention priority of blocks whose request named none, on a scale of 0 to 100."""


class Evictor:
    """The evictable blocks, in one queue for each tenant and retention priority.

    Between tenants the policy's rank decides, which can be compared between queues: whoever has the block that is next
    by rank, whatever its retention, loses one, and of its own blocks lower retention goes first. So a tenant's
    retention orders its own blocks, and cannot push out another's. A tenant at or below its floor is passed over when
    another asks.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        policy: Callable[[int, Callable[[int], bool]], EvictionPolicy],
        idle_times: IdleTimes,
    ) -> None:
        self._pool = pool
        self._index = index
        self.policy = policy(pool.num_blocks, self.is_evictable)
        self.idle_times = idle_times
        self._queues: dict[Account, dict[int, EvictionQueue]] = {}
        self._retention: dict[int, int] = {}  # of blocks whose retention is not the default
        self.evicted_hashes = EvictedHashes(pool.num_blocks)
        self.evictions_total = 0

    def is_evictable(self, block: int) -> bool:
        index = self._index
        return not self._pool.ref_counts[block] and index.first_child[block] == NONE and index.parents[block] != NONE

    def let_go(self, block: int, account: Account, *, queue: bool) -> None:
        """Note that a path ending at this block was used; ``queue`` it if the block may be evictable since."""
        self.policy.used(block)
        self.idle_times.used(block)
        if queue and self.is_evictable(block):
            self._queue(account, block).add(block)

    def retain(self, blocks: Sequence[int], retention: int) -> None:
        """Set the retention priority of a path's blocks; the last request to set it decides."""
        for block in blocks:
            self._set_retention(block, retention)

    def order(self, account: Account) -> list[int]:
        """A tenant's evictable blocks, next to go first. For tests and people; sorts."""
        queues = self._queues.get(account, {})
        return [block for _, queue in sorted(queues.items()) for block in queue.order()]

    def make_room(self, count: int, asker: Account, events: EventLog) -> None:
        """Evict until the asker can take ``count`` blocks within its cap, as far as that goes."""
        beyond_cap = asker.held + count - asker.cap
        if beyond_cap > 0:
            self._evict(min(beyond_cap, asker.cached), (asker,), asker, events)
        short = count - self._pool.num_free
        if short > 0:
            self._evict(short, tuple(self._queues), asker, events)

    def discarded(self, block: int) -> None:
        """Forget what was noted about a block that left the index by another way than eviction."""
        self._retention.pop(block, None)
        self.policy.discarded(block)

    def _set_retention(self, block: int, retention: int) -> None:
        if retention == DEFAULT_RETENTION:
            self._retention.pop(block, None)
        else:
            self._retention[block] = retention

    def _queue(self, account: Account, block: int) -> EvictionQueue:
        queues = self._queues.setdefault(account, {})
        retention = self._retention.get(block, DEFAULT_RETENTION) if self._retention else DEFAULT_RETENTION
        queue = queues.get(retention)
        if queue is None:
            queue = queues[retention] = self.policy.queue()
        return queue

    def _evict(self, count: int, owners: Sequence[Account], asker: Account, events: EventLog) -> None:
        while count > 0:
            choice = self._choose(owners, asker)
            if choice is None:
                return
            owner, queue, before = choice
            allowed = owner.cached if owner is asker else owner.evictable
            count -= self._evict_path(queue, owner, min(count, allowed), before, events)

    def _choose(self, owners: Sequence[Account], asker: Account) -> tuple[Account, EvictionQueue, float] | None:
        """The queue with the next victim, its tenant, and the rank up to which it goes on before another tenant's.

        Looks at each tenant that has evictable blocks; the tenants are few and configured.
        """
        best: tuple[float, Account, EvictionQueue] | None = None
        second = inf
        for owner in owners:
            if owner.cached == 0:
                self._queues.pop(owner, None)
                continue
            queue = self._lowest_queue(owner) if owner is asker or owner.evictable else None
            if queue is None:
                continue
            rank = self._rank(owner) if len(owners) > 1 else 0.0  # with nobody to be compared with
            if best is None or rank < best[0]:
                second = best[0] if best else inf
                best = rank, owner, queue
            else:
                second = min(second, rank)
        return (best[1], best[2], second) if best else None

    def _lowest_queue(self, owner: Account) -> EvictionQueue | None:
        """The tenant's queue of lowest retention that has a victim; empty ones are dropped."""
        queues = self._queues.get(owner, {})
        for retention in sorted(queues):
            if queues[retention].rank() is not None:
                return queues[retention]
            del queues[retention]
        return None

    def _rank(self, owner: Account) -> float:
        """The lowest rank of all of a tenant's queues, not that of the queue it loses from: else a young block of low
        retention would hide the old ones behind it from the comparison with other tenants.
        """
        queues = self._queues.get(owner, {}).values()
        return min((rank for queue in queues if (rank := queue.rank()) is not None), default=inf)

    def _climb(self, queue: EvictionQueue, owner: Account, leaf: int, limit: int) -> list[int]:
        """A leaf and those of its ancestors that follow it at once, each being evictable when its only child is gone.

        For where no other tenant is to be compared with. They are linked still, so that all can be unlinked together.
        """
        index, ref_counts, succeeds = self._index, self._pool.ref_counts, queue.succeeds
        parents, only, num_blocks = index.parents, index.is_only_child, index.num_blocks
        chain, block = [leaf], leaf
        while len(chain) < limit:
            parent = parents[block]
            if parent >= num_blocks or ref_counts[parent] or not only(block):
                break
            if self._retention and self._queue(owner, parent) is not queue:
                break
            if not succeeds(parent, block):
                break
            chain.append(parent)
            block = parent
        return chain

    def _evict_path(self, queue: EvictionQueue, owner: Account, limit: int, before: float, events: EventLog) -> int:
        """Evict a leaf and then its ancestors for as long as they are next. Returns how many went.

        Next means first in their queue, and their tenant's rank is at most ``before``: that of the other tenants.
        """
        index, hashes = self._index, self._index.hashes
        gone: list[int] = []
        block = queue.pop()
        while block is not None:
            chain = self._climb(queue, owner, block, limit - len(gone)) if before == inf else [block]
            parent = index.discard_chain(chain)
            self.idle_times.evicted(chain, parent)
            gone += chain
            if parent >= index.num_blocks or not self.is_evictable(parent):
                break
            self._queue(owner, parent).add(parent, chain[-1])
            if len(gone) == limit or queue.rank() is None or (before < inf and self._rank(owner) > before):
                break
            block = queue.pop()
        names = [block_hash for block in gone if (block_hash := hashes[block]) is not None]
        if self._retention:
            for block in gone:
                self._retention.pop(block, None)
        self._pool.reclaim(gone, owner)
        self.evictions_total += len(gone)
        self.evicted_hashes.add(owner.tenant, names)
        self.policy.evicted(names)
        events.removed(owner.tenant, names)
        return len(gone)
