"""The prefix cache as the worker sees it: match, admit, write, publish, fork, release.

One owner, one thread: every method runs on the engine's thread, between steps. Nothing here touches the pool's bytes;
what must happen to them is collected in a ``CopyPlan`` that the engine runs before the forward pass.

The order of a step is: ``admit`` and ``writable`` for what will run, ``run_plan`` on the storage, the forward pass,
sampling, then ``publish`` for the blocks that became full, and ``release`` for what ended. ``docs/cache.md`` tells why
each stands where it stands and what the other orders break.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prefixgate.cache.accounts import Account, Accounts, TenantShare
from prefixgate.cache.admission import Admission, Admitter, CacheMode
from prefixgate.cache.allocator import Allocator
from prefixgate.cache.block_pool import BlockPool
from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.copy_plan import Copy, CopyPlan
from prefixgate.cache.copy_planner import CopyPlanner
from prefixgate.cache.events import EventLog
from prefixgate.cache.eviction import EvictionPolicy
from prefixgate.cache.evictor import Evictor
from prefixgate.cache.hashing import BlockHash, BlockHasher, CacheScope
from prefixgate.cache.idle_times import IdleTimes
from prefixgate.cache.in_flight import InFlight
from prefixgate.cache.integrity import check_integrity
from prefixgate.cache.lru import LRUPolicy
from prefixgate.cache.matching import Explanation, Match, explain_match, match_prompt
from prefixgate.cache.pins import Pin, PinLimitError, Pins
from prefixgate.cache.prefix_index import PrefixIndex
from prefixgate.cache.prompt import Prompt
from prefixgate.cache.publisher import Publisher
from prefixgate.cache.stats import CacheStats


class PrefixCache:
    """Blocks, index and eviction behind the operations that a sequence's life needs."""

    def __init__(
        self,
        num_blocks: int,
        hasher: BlockHasher,
        *,
        shares: Mapping[str, TenantShare] | None = None,
        pin_limit: int = 0,
        index: Callable[[int], PrefixIndex] = PrefixIndex,
        policy: Callable[[int, Callable[[int], bool]], EvictionPolicy] = LRUPolicy,
        incarnation: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``shares`` are the tenants' floors and caps, ``pin_limit`` the most blocks that pins may hold. The
        ``clock``, in seconds, decides nothing: it only tells how long what is evicted had lain idle.

        Raises ValueError, with the numbers, where floors and pins leave nothing of the pool to share.
        """
        self.num_blocks = num_blocks
        self.block_size = hasher.block_size
        self.hasher = hasher
        self.accounts = Accounts(num_blocks, shares or {}, pin_limit=pin_limit)
        self.pool = BlockPool(num_blocks)
        self.index = index(num_blocks)
        self.events = EventLog(incarnation)
        self.pins = Pins(pin_limit)
        self.in_flight = InFlight()
        self.evictor = Evictor(self.pool, self.index, policy, IdleTimes(num_blocks, clock))
        self._publisher = Publisher(hasher, self.pool, self.index, self.evictor, self.events)
        self._planner = CopyPlanner(self.pool, self._release_source)
        self._allocator = Allocator(self.block_size, self.pool, self.accounts, self.evictor, self._planner, self.events)
        self._admitter = Admitter(self.block_size, self.pool, self.index, self.evictor, self._allocator, self._planner)
        self._tables: set[BlockTable] = set()

    # Questions

    def prompt(self, scope: CacheScope, token_ids: Sequence[int]) -> Prompt:
        """Pack and hash a prompt once, for a call that may have to ask several times."""
        return Prompt.of(self.hasher, scope, token_ids)

    def match(self, scope: CacheScope, token_ids: Sequence[int]) -> Match:
        """Find what of a prompt is cached. Changes nothing, not even the order of eviction."""
        return match_prompt(self.index, self.prompt(scope, token_ids), self.block_size)

    def explain(self, scope: CacheScope, token_ids: Sequence[int]) -> Explanation:
        """Tell where a prompt leaves the cache and why. Changes nothing; other scopes' content looks never seen."""
        prompt = self.prompt(scope, token_ids)
        match = match_prompt(self.index, prompt, self.block_size)
        claims = self._admitter.claims(match, CacheMode.DEFAULT)
        return explain_match(match, prompt, self.index, self.evictor.evicted_hashes, claims=claims)

    def leader(self, prompt: Prompt) -> BlockTable | None:
        """The table that is computing the first node this prompt misses, where one is: waiting for it is a hit."""
        root = self.index.find_root(prompt.scope)
        if root is None or not self.in_flight:
            return None
        match = self._admitter.match(prompt)
        position = len(match.blocks)
        if position >= (prompt.num_tokens - 1) // self.block_size:
            return None
        return self.in_flight.leader(match.blocks[-1] if match.blocks else root, prompt.contents[position])

    def blocks_needed(self, prompt_tokens: int, max_new_tokens: int, outputs: int) -> int:
        """Blocks that a call holds at its largest, sharing with nobody: what a pool must have to ever serve it.

        The last sampled token is never an input, so it needs no slot.
        """
        whole = self._allocator.blocks_for(prompt_tokens + max_new_tokens - 1)
        return whole + (outputs - 1) * (whole - prompt_tokens // self.block_size)

    def ceiling(self, tenant: str) -> int:
        """The most blocks that one call of the tenant can ever hold: its cap, and what others' floors leave."""
        return self.accounts.ceiling(tenant)

    def demand(self, prompt: Prompt, growth: int, mode: CacheMode) -> int:
        """Blocks of room that admitting a prompt with so much growth takes at least."""
        needed = self._allocator.blocks_for(prompt.num_tokens) + growth
        found = self._admitter.match_for(prompt, mode)
        whole = self._admitter.demand(found._replace(partial=None), needed, mode)
        return min(whole, self._admitter.demand(found, needed, mode))

    def room(self, tenant: str) -> int:
        """Blocks that a tenant could take now, without touching what live calls have and what others are owed."""
        return self._allocator.room(self.accounts.view(tenant))

    def stats(self) -> CacheStats:
        """Count; O(1)."""
        pool = self.pool
        return CacheStats(
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            active_blocks=pool.num_active,
            cached_blocks=pool.num_cached,
            reserved_blocks=self.accounts.total_promised,
            pinned_blocks=self.pins.num_blocks,
            evictions_total=self.evictor.evictions_total,
            evicted_idle_seconds_total=self.evictor.idle_times.evicted_seconds_total,
            copies_total=self._planner.copies_total,
            collisions_total=self.index.collisions_total,
        )

    def tables(self) -> Iterable[BlockTable]:
        """The live tables, in no order."""
        return tuple(self._tables)

    def planned_copies(self) -> list[Copy]:
        """Copies that the next plan will hold."""
        return self._planner.planned()

    def check_integrity(self) -> None:
        """Check every invariant of pool, index and tables. Raises IntegrityError with what is wrong; O(blocks)."""
        check_integrity(self)

    def snapshot(self) -> list[tuple[str, BlockHash]]:
        """Tenant and hash of every block that can be hit, parents before children, as of ``events.last``."""
        index = self.index
        return [
            (index.scope_of(root).tenant, block_hash)
            for root in index.roots()
            if not index.is_detached(root)
            for node in index.walk(root)
            if (block_hash := index.hashes[node]) is not None
        ]

    # A sequence's life

    def admit(
        self,
        scope: CacheScope,
        token_ids: list[int],
        *,
        outputs: int = 1,
        max_new_tokens: int,
        mode: CacheMode = CacheMode.DEFAULT,
        retention: int | None = None,
        prompt: Prompt | None = None,
        growth: int | None = None,
    ) -> Admission | None:
        """Match, plan and commit in one transaction: all of a call's blocks are held or promised, or nothing changed.

        The blocks of the prompt are held now. Of those it may need later ``growth`` are promised; all of them where it
        is None, and then the call never runs out. Returns None where there is no room at present. Raises ValueError
        for a call that can never fit. ``prompt`` saves packing and hashing where the caller did it before.
        """
        needed = self.blocks_needed(len(token_ids), max_new_tokens, outputs)
        if needed > self.ceiling(scope.tenant):
            raise ValueError(f"the call needs {needed} blocks; the tenant can have {self.ceiling(scope.tenant)}")
        prompt = prompt or self.prompt(scope, token_ids)
        if growth is not None:
            needed = min(needed, self._allocator.blocks_for(len(token_ids)) + growth)
        admission = self._admitter.admit(prompt, token_ids, needed, mode)
        if admission is not None:
            # A call that keeps nothing has no say in how long others' blocks are kept.
            admission.table.retention = retention if mode is CacheMode.DEFAULT else None
            self._tables.add(admission.table)
            self.in_flight.advance(admission.table)
        return admission

    def fork(self, table: BlockTable, token_ids: list[int]) -> BlockTable:
        """Share all of a table's blocks with a new sequence that begins with the same tokens.

        ``token_ids`` is the new sequence's own live list. All full blocks must be published: two tables that both had
        one to publish would not agree on whose it is.
        """
        if table.publishable and table.num_published < len(table.token_ids) // self.block_size:
            raise RuntimeError(f"a table is forked with {table.num_published} of its full blocks published")
        self.pool.hold(table.block_ids, table.account)
        self.index.share_root(table.root)
        table.reservation.holders += 1
        fork = table.forked(token_ids)
        self._tables.add(fork)
        return fork

    def writable(self, table: BlockTable, start: int, stop: int) -> int:
        """Make the slots of positions ``[start, stop)`` exist and belong to this table alone.

        Takes the blocks that are missing, and plans a copy where the block of ``start`` is shared. Returns the number
        of blocks copied (0 or 1: later blocks are new). Raises NoFreeBlocksError, with nothing changed, where more is
        needed than admission promised and the tenant has room for.
        """
        block_ids = table.block_ids
        first = start // self.block_size
        copied = int(first < len(block_ids) and self._is_shared(block_ids[first]))
        missing = max(0, self._allocator.blocks_for(stop) - len(block_ids))
        if not copied and not missing:
            return 0
        # All at once, so that nothing has changed where there are too few.
        own = self._allocator.take_promised(table, copied + missing)
        if copied:
            # The table's reference to the source passes to the planner.
            source, block_ids[first] = block_ids[first], own.pop(0)
            self._planner.add(Copy(source, block_ids[first], start % self.block_size), table.account)
        block_ids += own
        return copied

    def publish(self, table: BlockTable, num_written: int) -> None:
        """Index the blocks that are full now that the table's first ``num_written`` slots are written.

        To be called after the step that wrote them has completed.
        """
        before = table.num_published
        self._publisher.publish(table, num_written)
        if table.frontier is not None and (table.num_published > before or not table.publishable):
            self.in_flight.advance(table)

    def release(self, table: BlockTable, num_written: int) -> None:
        """Let go of all blocks; the exit of every sequence, whatever ended it. A second call does nothing.

        ``num_written`` slots hold what ``token_ids`` say. Full blocks of them stay cached, and the unfinished last
        one as a tail, for the next turn of the conversation.
        """
        if table.released:
            return
        self.in_flight.leave(table)
        num_written = self._num_in_place(table, num_written)
        self._publisher.publish(table, num_written)
        table.released = True
        self._tables.discard(table)
        tail = self._publisher.keep_tail(table, num_written)
        own = table.block_ids[table.num_published :]
        if tail is not None:
            own.remove(tail)
        for block in own:
            if self.pool.ref_counts[block] == 1:
                self._planner.forget(block)
        self.pool.release(reversed(own), table.account, published=False)
        path = table.block_ids[: table.num_published]
        if tail is not None:
            path.append(tail)
        if table.retention is not None:
            self.evictor.retain(path, table.retention)
        self._leave_path(path, table.account, table.root)
        self._allocator.settle(table)
        self.index.drop_root(table.root)
        self.accounts.forget_empty(table.account)

    def _num_in_place(self, table: BlockTable, num_written: int) -> int:
        """Leave out what a planned copy is still to bring, where a sequence ends before its step.

        Kept as a tail, its block could be evicted, and handed out again, under the copy.
        """
        position = num_written // self.block_size
        if position < len(table.block_ids) and self._planner.fills(table.block_ids[position]):
            return position * self.block_size
        return num_written

    def run_plan(self, execute: Callable[[CopyPlan], None]) -> None:
        """Have everything done to the bytes that must happen before the next forward pass."""
        self._planner.run(execute)

    # Pins and flushes

    def pin(self, scope: CacheScope, token_ids: Sequence[int], *, expires_at: float) -> Pin:
        """Hold the whole blocks of a prompt that are cached now, until ``unpin`` or ``expire``.

        Raises PinLimitError, with the numbers, where it would pin more than the limit allows, or more than the tenant
        may take now: cached blocks that are pinned can no longer make room for what others are owed or were promised.
        A prompt of which nothing is cached gives a pin without blocks. Blocks that are pinned as they are keep their
        pin, which is extended where that is later.
        """
        prompt = self.prompt(scope, token_ids)
        root = self.index.hold_root(scope)
        blocks, _ = self.index.match(root, prompt.hashes, prompt.contents)
        extended = self.pins.extend(blocks, expires_at)
        if extended is not None:
            self.index.drop_root(root)
            return extended
        account = self.accounts.of(scope.tenant)
        try:
            idle = sum(1 for block in blocks if not self.pool.ref_counts[block])
            if idle > (room := self._allocator.room(account)):
                raise PinLimitError(f"{idle} idle blocks would be pinned; the tenant can take {max(0, room)} now")
            pin = self.pins.add(account, root, blocks, expires_at)
        except PinLimitError:
            self.index.drop_root(root)
            self.accounts.forget_empty(account)
            raise
        self.pool.hold(blocks, account)
        return pin

    def unpin(self, tenant: str, pin_id: int) -> bool:
        """Release a tenant's pin. Returns whether it was there; another tenant's is not."""
        pin = self.pins.remove(pin_id, tenant)
        if pin is not None:
            self._release_pin(pin)
        return pin is not None

    def expire(self, now: float) -> int:
        """Release the pins whose time has come. Returns how many; costs nothing where none has."""
        expired = self.pins.expired(now)
        for pin in expired:
            self._release_pin(pin)
        return len(expired)

    def flush(self, tenant: str, salt: str | None = None) -> int:
        """Forget what is cached for a tenant, or under one of its salts only. Returns how many blocks became free.

        What live sequences and pins hold stays theirs, can no longer be found, and becomes free when they end.
        """
        freed = 0
        for root in self.index.roots_of(tenant, salt):
            for table in self._tables:
                if table.root == root:
                    self.in_flight.leave(table)
                    table.publishable = False
            nodes = self.index.walk(root)
            if salt is not None:
                names = [found for node in nodes if (found := self.index.hashes[node]) is not None]
                self.events.removed(tenant, names, flushed=True)
            self.index.detach_root(root)
            freed += self._free_idle(nodes, self.accounts.of(tenant))
        if salt is None:
            self.evictor.evicted_hashes.forget(tenant)
            self.events.cleared(tenant)
        return freed

    # How blocks are taken and let go

    def _is_shared(self, block: int) -> bool:
        """Whether another table holds the block too.

        Copies planned out of it hold it as well, but they run before whatever this step writes: of n holders that
        write in one step the last keeps the block.
        """
        count = self.pool.ref_counts[block]
        return count > 1 and count - self._planner.readers(block) > 1

    def _leave_path(self, path: Sequence[int], account: Account, root: int) -> None:
        """Drop a holder's references to a path of published blocks, and note the use for eviction."""
        idle = self.pool.release(reversed(path), account, published=True)
        if self.index.is_detached(root):
            self._free_idle(path, account)
        elif path:
            self.evictor.let_go(path[-1], account, queue=idle > 0)

    def _free_idle(self, nodes: Sequence[int], account: Account) -> int:
        """Make the nodes free that nobody holds, children before parents. Returns how many."""
        idle = [node for node in reversed(nodes) if not self.pool.ref_counts[node] and self.index.is_node(node)]
        for node in idle:
            self.index.discard(node)
            self.evictor.discarded(node)
        self.pool.reclaim(idle, account)
        return len(idle)

    def _release_pin(self, pin: Pin) -> None:
        self._leave_path(pin.blocks, pin.account, pin.root)
        self.index.drop_root(pin.root)
        self.accounts.forget_empty(pin.account)

    def _release_source(self, block: int, account: Account) -> None:
        """Let go of a copy's source: a node that was matched in part, or a block that sequences shared."""
        published = self.index.is_node(block)
        idle = self.pool.release((block,), account, published=published)
        if not published:
            return
        if self.index.is_detached(self.index.root_of(block)):
            self._free_idle((block,), account)
        else:
            self.evictor.let_go(block, account, queue=idle > 0)
