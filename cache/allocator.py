"""How a table comes by blocks: free ones, evicted ones, and those it was promised."""

from prefixgate.cache.accounts import Account, Accounts
from prefixgate.cache.block_pool import BlockPool, NoFreeBlocksError
from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.copy_planner import CopyPlanner
from prefixgate.cache.events import EventLog
from prefixgate.cache.evictor import Evictor


class Allocator:
    """Takes blocks from the pool for a tenant, evicting where that is needed, and keeps the promises of admission."""

    def __init__(
        self,
        block_size: int,
        pool: BlockPool,
        accounts: Accounts,
        evictor: Evictor,
        planner: CopyPlanner,
        events: EventLog,
    ) -> None:
        self._block_size = block_size
        self._pool = pool
        self._accounts = accounts
        self._evictor = evictor
        self._planner = planner
        self._events = events

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def room(self, account: Account) -> int:
        """Blocks that a tenant could take now without touching what others hold, are owed or were promised."""
        return self._accounts.room(account, free=self._pool.num_free, cached=self._pool.num_cached)

    def account(self, tenant: str) -> Account:
        return self._accounts.of(tenant)

    def forget_empty(self, account: Account) -> None:
        self._accounts.forget_empty(account)

    def take(self, count: int, account: Account) -> list[int]:
        """Hand out blocks, each with one reference. Raises NoFreeBlocksError where even eviction gives too few."""
        if count > self._pool.num_free or account.held + count > account.cap:
            self._evictor.make_room(count, account, self._events)
        taken = self._pool.take(count, account)
        self._planner.fresh(taken)
        return taken

    def promise(self, table: BlockTable, blocks: int) -> None:
        """Keep room for blocks that the table's call may need later."""
        table.reservation.remaining = blocks
        self._accounts.promise(table.account, blocks)

    def take_promised(self, table: BlockTable, count: int) -> list[int]:
        """Hand out blocks of a promise, and beyond it only what nobody else was promised."""
        account, reservation = table.account, table.reservation
        promised = min(count, reservation.remaining)
        beyond = count - promised
        if beyond > 0 and beyond > self.room(account):
            raise NoFreeBlocksError(f"{count} blocks were asked for, {promised} were promised")
        taken = self.take(count, account)
        reservation.remaining -= promised
        self._accounts.settle(account, promised)
        return taken

    def settle(self, table: BlockTable) -> None:
        """A table ends; with the last one of its call the rest of the promise is void."""
        reservation = table.reservation
        reservation.holders -= 1
        if not reservation.holders:
            self._accounts.settle(table.account, reservation.remaining)
            reservation.remaining = 0
