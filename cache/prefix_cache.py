"""The prefix cache as the worker sees it: match, admit, write, publish, fork, release.

One owner, one thread: every method runs on the engine's thread, between steps. Nothing here touches the pool's bytes;
what must happen to them is collected in a ``CopyPlan`` that the engine runs before the forward pass.

The order of a step is: ``admit`` and ``writable`` for what will run, ``take_plan``, run it on the storage,
``plan_done``, the forward pass, sampling, then ``publish`` for the blocks that became full, and ``release`` for what
ended. See ``docs/architecture.md`` for why each stands where it stands.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prefixgate.cache.block_pool import BlockPool, NoFreeBlocksError
from prefixgate.cache.block_table import BlockTable, Reservation
from prefixgate.cache.copy_plan import Copy, CopyPlan
from prefixgate.cache.hashing import ROOT_HASH, BlockHash, BlockHasher, CacheScope, pack_ids
from prefixgate.cache.integrity import check_integrity
from prefixgate.cache.lru import LRUPolicy
from prefixgate.cache.prefix_index import NONE, PartialMatch, PrefixIndex

_TOKEN_BYTES = 4


class Match(NamedTuple):
    """What of a prompt is cached at this moment. A hint: it says nothing about the next moment."""

    blocks: list[int]
    """Whole blocks, in order."""
    partial: PartialMatch | None
    """Where the prompt leaves the tree inside a block: the child to copy from, or the tail to take over."""
    block_size: int

    @property
    def cached_tokens(self) -> int:
        return len(self.blocks) * self.block_size + (self.partial.tokens if self.partial else 0)


class Admission(NamedTuple):
    """A call's blocks, and where the tokens in them come from."""

    table: BlockTable
    block_hit_tokens: int
    """Tokens in whole blocks that are shared."""
    partial_copy_tokens: int
    """Tokens copied out of a block that goes on differently."""
    claimed_tail_tokens: int
    """Tokens in the tail of a finished sequence that this one took over."""
    copied_blocks: int

    @property
    def cached_tokens(self) -> int:
        return self.block_hit_tokens + self.partial_copy_tokens + self.claimed_tail_tokens


class CacheStats(NamedTuple):
    """The cache at this moment, in blocks, and what it did since it was made."""

    total_blocks: int
    free_blocks: int
    active_blocks: int
    cached_blocks: int
    reserved_blocks: int
    references: int
    evictions_total: int
    copies_total: int
    collisions_total: int


class _Prompt(NamedTuple):
    """A prompt, packed and hashed once for matching, admitting and publishing."""

    packed: bytes
    contents: list[bytes]
    hashes: list[BlockHash]


class PrefixCache:
    """Blocks, index and eviction behind the operations that a sequence's life needs."""

    def __init__(self, num_blocks: int, hasher: BlockHasher) -> None:
        self.num_blocks = num_blocks
        self.block_size = hasher.block_size
        self.hasher = hasher
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(num_blocks, hasher)
        self.policy = LRUPolicy(num_blocks, self._is_evictable)
        self.evictions_total = 0
        self.copies_total = 0
        self._tables: set[BlockTable] = set()
        self._reserved = 0
        self._copies: dict[int, Copy] = {}  # by destination
        self._fresh: list[int] = []
        self._plans: list[CopyPlan] = []  # taken and not done: their sources are held

    # Questions

    def match(self, scope: CacheScope, token_ids: Sequence[int]) -> Match:
        """Find what of a prompt is cached. Changes nothing, not even the order of eviction."""
        prompt = self._pack(self.hasher.scope_digest(scope), token_ids)
        return self._match(self.index.find_root(scope), prompt, len(token_ids))[0]

    def blocks_needed(self, prompt_tokens: int, max_new_tokens: int, outputs: int) -> int:
        """Blocks that a call holds at its largest, sharing with nobody: what a pool must have to ever serve it.

        The last sampled token is never an input, so it needs no slot.
        """
        whole = self._blocks_for(prompt_tokens + max_new_tokens - 1)
        return whole + (outputs - 1) * (whole - prompt_tokens // self.block_size)

    def stats(self) -> CacheStats:
        """Count; O(blocks) for the references, so for scrapes and tests."""
        pool = self.pool
        return CacheStats(
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            active_blocks=pool.num_active,
            cached_blocks=pool.num_cached,
            reserved_blocks=self._reserved,
            references=sum(pool.ref_counts),
            evictions_total=self.evictions_total,
            copies_total=self.copies_total,
            collisions_total=self.index.collisions_total,
        )

    def tables(self) -> Iterable[BlockTable]:
        """The live tables, in no order."""
        return tuple(self._tables)

    def copies_under_way(self) -> list[Copy]:
        """Copies planned or taken whose sources are still held."""
        return [*self._copies.values(), *(copy for plan in self._plans for copy in plan.copies)]

    def check_integrity(self) -> None:
        """Check every invariant of pool, index and tables. Raises IntegrityError with what is wrong; O(blocks)."""
        check_integrity(self)

    # A sequence's life

    def admit(
        self, scope: CacheScope, token_ids: list[int], *, outputs: int = 1, max_new_tokens: int
    ) -> Admission | None:
        """Match, plan and commit in one transaction: all of a call's blocks are held or promised, or nothing changed.

        The blocks of the prompt are held now, the rest is reserved, so an admitted call never runs out. Returns None
        where there is no room at present. Raises ValueError for a call that can never fit.
        """
        prompt_tokens = len(token_ids)
        needed = self.blocks_needed(prompt_tokens, max_new_tokens, outputs)
        if needed > self.num_blocks:
            raise ValueError(f"the call needs {needed} blocks; the pool has {self.num_blocks}")
        digest = self.hasher.scope_digest(scope)
        prompt = self._pack(digest, token_ids)
        root = self.index.find_root(scope)
        found, collided = self._match(root, prompt, prompt_tokens)
        if not self._has_room(found, needed):
            # The source of a partial copy stays held while it is copied, which can be the one block too many.
            found = found._replace(partial=None)
            if not self._has_room(found, needed):
                return None
        self.index.collisions_total += collided
        return self._commit(scope, digest, token_ids, prompt, found, needed)

    def fork(self, table: BlockTable, token_ids: list[int]) -> BlockTable:
        """Share all of a table's blocks with a new sequence that begins with the same tokens.

        ``token_ids`` is the new sequence's own live list.
        """
        self.pool.hold(table.block_ids)
        table.reservation.holders += 1
        fork = BlockTable(
            scope=table.scope,
            token_ids=token_ids,
            root=self.index.hold_root(table.scope),
            scope_digest=table.scope_digest,
            reservation=table.reservation,
            block_ids=list(table.block_ids),
            hashes=list(table.hashes),
            contents=list(table.contents),
            num_published=table.num_published,
            publishable=table.publishable,
        )
        self._tables.add(fork)
        return fork

    def writable(self, table: BlockTable, start: int, stop: int) -> int:
        """Make the slots of positions ``[start, stop)`` exist and belong to this table alone.

        Takes the blocks that are missing, and plans a copy where the block of ``start`` is shared. Returns the number
        of blocks copied (0 or 1: later blocks are new). Raises NoFreeBlocksError beyond what admission reserved.
        """
        block_ids, copied = table.block_ids, 0
        first = start // self.block_size
        if first < len(block_ids) and self._is_shared(block_ids[first]):
            self._copy_on_write(table, first, start % self.block_size)
            copied = 1
        missing = self._blocks_for(stop) - len(block_ids)
        if missing > 0:
            block_ids += self._take_reserved(table.reservation, missing)
        return copied

    def publish(self, table: BlockTable, num_written: int) -> None:
        """Index the blocks that are full now that the table's first ``num_written`` slots are written.

        To be called after the step that wrote them has completed. Where the same node was published meanwhile, the
        table moves to its block and lets go of its own, so that equal content has one block and a parent is never
        referenced less than its children.
        """
        full = num_written // self.block_size
        if full <= table.num_published or not table.publishable:
            return
        self._hash_up_to(table, full)
        done, index = table.num_published, self.index
        hashes, contents = table.hashes[done:full], table.contents[done:full]
        parent = table.block_ids[done - 1] if done else table.root
        unique = len(set(hashes)) == len(hashes)
        if unique and all(index.find(block_hash) is None for block_hash in hashes):
            self._drop_superseded_tail(parent, contents[0])
            index.insert_chain(table.block_ids[done:full], parent, contents, hashes)
            table.num_published = full
            return
        for block_hash, content in zip(hashes, contents, strict=True):
            if not self._publish_one(table, parent, block_hash, content):
                table.publishable = False
                return
            parent = table.block_ids[table.num_published - 1]

    def release(self, table: BlockTable, num_written: int) -> None:
        """Let go of all blocks; the exit of every sequence, whatever ended it. A second call does nothing.

        ``num_written`` slots hold what ``token_ids`` say. Full blocks of them stay cached, and the unfinished last
        one as a tail, for the next turn of the conversation.
        """
        if table.released:
            return
        self.publish(table, num_written)
        table.released = True
        self._tables.discard(table)
        tail = self._keep_tail(table, num_written)
        own = [block for block in table.block_ids[table.num_published :] if block != tail]
        for block in own:
            self._forget_copy_to(block)
        self.pool.release(reversed(own), published=False)
        self._leave_path(table.block_ids[: table.num_published], tail)
        self._return_reservation(table.reservation)
        self.index.drop_root(table.root)

    # The bytes

    def take_plan(self) -> CopyPlan:
        """What must be done to the storage before the next forward pass. Its sources stay held until ``plan_done``."""
        plan = CopyPlan(list(self._copies.values()), self._fresh)
        self._plans.append(plan)
        self._copies, self._fresh = {}, []
        return plan

    def plan_done(self, plan: CopyPlan) -> None:
        """The plan's copies are ordered before whatever will be written next: their sources may be let go."""
        self._plans.remove(plan)
        for copy in plan.copies:
            self._release_source(copy.src)

    # How admission works

    def _pack(self, scope_digest: bytes, token_ids: Sequence[int]) -> _Prompt:
        packed = pack_ids(token_ids)
        contents = self.hasher.split(packed)
        return _Prompt(packed, contents, self.hasher.hash_blocks(ROOT_HASH, scope_digest, contents))

    def _match(self, root: int | None, prompt: _Prompt, prompt_tokens: int) -> tuple[Match, bool]:
        """Match all but the last token, which is computed in any case: without it there are no logits."""
        if root is None:
            return Match([], None, self.block_size), False
        usable = (prompt_tokens - 1) // self.block_size
        blocks, collided = self.index.match(root, prompt.hashes[:usable], prompt.contents[:usable])
        begin = len(blocks) * self.block_size
        end = min(begin + self.block_size, prompt_tokens - 1)
        continuation = prompt.packed[begin * _TOKEN_BYTES : end * _TOKEN_BYTES]
        partial = self.index.longest_partial(blocks[-1] if blocks else root, continuation) if continuation else None
        return Match(blocks, partial, self.block_size), collided

    def _has_room(self, found: Match, needed: int) -> bool:
        """Whether the pool can give all that is needed beyond the hits.

        Hits that nobody holds are evictable now and will not be: they are counted out, as are other calls' promises.
        """
        ref_counts = self.pool.ref_counts
        revived = sum(1 for block in found.blocks if not ref_counts[block])
        if found.partial and not ref_counts[found.partial.block]:
            revived += 1
        held = len(found.blocks) + (1 if self._claims(found) else 0)
        return needed - held <= self.pool.num_free + self.pool.num_cached - revived - self._reserved

    def _claims(self, found: Match) -> bool:
        """Whether the partial match is a tail that nobody holds and that agrees to its end: it needs no copy."""
        return found.partial is not None and found.partial.whole_tail and not self.pool.ref_counts[found.partial.block]

    def _commit(
        self, scope: CacheScope, digest: bytes, token_ids: list[int], prompt: _Prompt, found: Match, needed: int
    ) -> Admission:
        claims = self._claims(found)
        # Everything that is used is held before anything is taken: taking may evict.
        self.pool.hold(found.blocks)
        block_ids = list(found.blocks)
        if found.partial:
            self.pool.hold((found.partial.block,))
        if found.partial and claims:
            self.index.discard(found.partial.block)
            block_ids.append(found.partial.block)
        own = self._take(self._blocks_for(len(token_ids)) - len(block_ids))
        if found.partial and not claims:
            self._plan_copy(Copy(found.partial.block, own[0], found.partial.tokens))
        block_ids += own
        reservation = Reservation(needed - len(block_ids))
        self._reserved += reservation.remaining
        table = BlockTable(
            scope=scope,
            token_ids=token_ids,
            root=self.index.hold_root(scope),
            scope_digest=digest,
            reservation=reservation,
            block_ids=block_ids,
            hashes=prompt.hashes,
            contents=prompt.contents,
            num_published=len(found.blocks),
        )
        self._tables.add(table)
        partial_tokens = found.partial.tokens if found.partial else 0
        return Admission(
            table=table,
            block_hit_tokens=len(found.blocks) * self.block_size,
            partial_copy_tokens=0 if claims else partial_tokens,
            claimed_tail_tokens=partial_tokens if claims else 0,
            copied_blocks=int(bool(found.partial) and not claims),
        )

    # How blocks are taken, copied, evicted

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _take(self, count: int) -> list[int]:
        short = count - self.pool.num_free
        if short > 0:
            self._evict(short)
        taken = self.pool.take(count)
        self._fresh += taken
        return taken

    def _take_reserved(self, reservation: Reservation, count: int) -> list[int]:
        beyond = count - reservation.remaining
        if beyond > 0:
            spare = self.pool.num_free + self.pool.num_cached - self._reserved
            if beyond > spare:
                raise NoFreeBlocksError(f"{count} blocks were asked for, {reservation.remaining} were reserved")
        taken = self._take(count)
        from_promise = min(count, reservation.remaining)
        reservation.remaining -= from_promise
        self._reserved -= from_promise
        return taken

    def _return_reservation(self, reservation: Reservation) -> None:
        reservation.holders -= 1
        if not reservation.holders:
            self._reserved -= reservation.remaining
            reservation.remaining = 0

    def _is_evictable(self, block: int) -> bool:
        index = self.index
        return not self.pool.ref_counts[block] and index.parents[block] != NONE and index.first_child[block] == NONE

    def _evict(self, count: int) -> None:
        """Make cached blocks free, leaves first, in the policy's order."""
        reclaimed: list[int] = []
        while len(reclaimed) < count:
            block = self.policy.pop()
            if block is None:
                break
            parent = self.index.discard(block)
            reclaimed.append(block)
            if parent < self.num_blocks and self._is_evictable(parent):
                self.policy.add(parent, block)
        self.pool.reclaim(reclaimed)
        self.evictions_total += len(reclaimed)

    def _is_shared(self, block: int) -> bool:
        """Whether another table holds the block too.

        Copies that are planned out of it hold it as well, but run before whatever this step writes: of n holders that
        write in one step the last keeps the block.
        """
        count = self.pool.ref_counts[block]
        return count > 1 and count - sum(1 for copy in self._copies.values() if copy.src == block) > 1

    def _copy_on_write(self, table: BlockTable, position: int, tokens: int) -> None:
        """Give a table its own copy of a block that it shares.

        The table's reference keeps the source alive while the destination is taken, and passes to the plan, which
        keeps it until the copy is ordered.
        """
        source = table.block_ids[position]
        (own,) = self._take_reserved(table.reservation, 1)
        table.block_ids[position] = own
        self._plan_copy(Copy(source, own, tokens))

    def _plan_copy(self, copy: Copy) -> None:
        """Add a copy, whose source's reference is the plan's from now on.

        A source that is itself only planned to be filled is replaced by where its content will come from, so that no
        block is source and destination in one plan. What lies beyond the planned tokens is not written yet.
        """
        planned = self._copies.get(copy.src)
        if planned is not None:
            self.pool.hold((planned.src,))
            self._release_source(copy.src)
            copy = Copy(planned.src, copy.dst, min(copy.tokens, planned.tokens))
        self._copies[copy.dst] = copy
        self.copies_total += 1

    def _forget_copy_to(self, block: int) -> None:
        """Drop the planned copy into a block that its last holder lets go before the copy ran."""
        if block in self._copies and self.pool.ref_counts[block] == 1:
            self._release_source(self._copies.pop(block).src)

    def _release_source(self, block: int) -> None:
        published = self.index.is_node(block)
        if self.pool.release((block,), published=published) and published:
            self.policy.used(block)
            if self._is_evictable(block):
                self.policy.add(block)

    # How blocks enter and leave the index

    def _hash_up_to(self, table: BlockTable, full: int) -> None:
        have, size = len(table.hashes), self.block_size
        if full <= have:
            return
        contents = self.hasher.split(pack_ids(table.token_ids[have * size : full * size]))
        parent = table.hashes[-1] if table.hashes else ROOT_HASH
        table.hashes = table.hashes + self.hasher.hash_blocks(parent, table.scope_digest, contents)
        table.contents = table.contents + contents

    def _publish_one(self, table: BlockTable, parent: int, block_hash: BlockHash, content: bytes) -> bool:
        """Publish a table's next block, or move the table to the block that was published before it.

        Returns False where other content has the hash: then this node cannot be, nor anything below it.
        """
        index, position = self.index, table.num_published
        own = table.block_ids[position]
        existing = index.find(block_hash)
        if existing is None:
            self._drop_superseded_tail(parent, content)
            index.insert(own, parent, content, block_hash)
        elif index.parents[existing] == parent and index.contents[existing] == content:
            self.pool.hold((existing,))
            table.block_ids[position] = existing
            self.pool.release((own,), published=False)
        else:
            index.collisions_total += 1
            return False
        table.num_published = position + 1
        return True

    def _keep_tail(self, table: BlockTable, num_written: int) -> int | None:
        """Keep the unfinished last block in the index, where it says something that no sibling says."""
        written = num_written % self.block_size
        position = num_written // self.block_size
        if not written or position != table.num_published or not table.publishable:
            return None
        block = table.block_ids[position]
        if self.pool.ref_counts[block] > 1 or block in self._copies:
            return None
        begin = position * self.block_size
        content = pack_ids(table.token_ids[begin : begin + written])
        parent = table.block_ids[position - 1] if position else table.root
        sibling = self.index.longest_partial(parent, content)
        if sibling is not None and sibling.tokens == written:
            return None
        self._drop_superseded_tail(parent, content)
        self.index.insert(block, parent, content, None)
        return block

    def _drop_superseded_tail(self, parent: int, content: bytes) -> None:
        """Evict the unheld tail that the new child of a parent repeats and goes beyond."""
        sibling = self.index.longest_partial(parent, content)
        if sibling and sibling.whole_tail and not self.pool.ref_counts[sibling.block]:
            self.index.discard(sibling.block)
            self.pool.reclaim((sibling.block,))

    def _leave_path(self, path: Sequence[int], tail: int | None) -> None:
        """Drop a table's references to its published blocks and note the use for eviction."""
        idle = self.pool.release(reversed(path), published=True)
        if tail is not None:
            self.pool.keep(tail)
            self.policy.used(tail)
            self.policy.add(tail)
        if not path:
            return
        last = path[-1]
        self.policy.used(last)
        if idle and self._is_evictable(last):
            self.policy.add(last)
