"""How a call gets its blocks: matched, planned and committed in one transaction."""

from enum import Enum
from typing import NamedTuple

from prefixgate.cache.accounts import Account
from prefixgate.cache.allocator import Allocator
from prefixgate.cache.block_pool import BlockPool
from prefixgate.cache.block_table import BlockTable, Reservation
from prefixgate.cache.copy_plan import Copy
from prefixgate.cache.copy_planner import CopyPlanner
from prefixgate.cache.evictor import Evictor
from prefixgate.cache.matching import Match, MissReason, match_prompt, miss_reason
from prefixgate.cache.prefix_index import PrefixIndex
from prefixgate.cache.prompt import Prompt


class CacheMode(Enum):
    """What a call reads and keeps."""

    DEFAULT = "default"
    READ_ONLY = "read_only"
    """Reads what is cached, keeps nothing."""
    BYPASS = "bypass"
    """Neither reads nor keeps."""


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
    miss_reason: MissReason

    @property
    def cached_tokens(self) -> int:
        return self.block_hit_tokens + self.partial_copy_tokens + self.claimed_tail_tokens


class Admitter:
    """Plans a call against what the pool can give, and commits the plan whole or not at all."""

    def __init__(
        self,
        block_size: int,
        pool: BlockPool,
        index: PrefixIndex,
        evictor: Evictor,
        allocator: Allocator,
        planner: CopyPlanner,
    ) -> None:
        self._block_size = block_size
        self._pool = pool
        self._index = index
        self._evictor = evictor
        self._allocator = allocator
        self._planner = planner
        self._matched: tuple[Prompt, int, Match] | None = None

    def admit(self, prompt: Prompt, token_ids: list[int], needed: int, mode: CacheMode) -> Admission | None:
        """Give a call the blocks of its prompt and promise it the rest of the ``needed`` ones; None changes nothing."""
        account = self._allocator.account(prompt.scope.tenant)
        found = self.match_for(prompt, mode)
        reason = self._miss_reason(found, prompt, mode)
        if not self._has_room(account, found, needed, mode):
            # The source of a partial copy stays held while it is copied, which can be the one block too many.
            found = found._replace(partial=None)
            if not self._has_room(account, found, needed, mode):
                self._allocator.forget_empty(account)
                return None
        self._index.collisions_total += found.collided
        table = self._open_table(prompt, account, token_ids, found.blocks)
        table.publishable = self._index.keeps and mode is CacheMode.DEFAULT
        claims = self._fill_table(table, found, mode)
        self._allocator.promise(table, needed - len(table.block_ids))
        partial = found.partial.tokens if found.partial else 0
        return Admission(
            table=table,
            block_hit_tokens=len(found.blocks) * self._block_size,
            partial_copy_tokens=0 if claims else partial,
            claimed_tail_tokens=partial if claims else 0,
            copied_blocks=int(found.partial is not None and not claims),
            miss_reason=reason,
        )

    def match(self, prompt: Prompt) -> Match:
        """Match a prompt; asked again before the tree has changed (is it worth waiting? then admit), answer again."""
        version = self._index.version
        if self._matched is None or self._matched[0] is not prompt or self._matched[1] != version:
            self._matched = prompt, version, match_prompt(self._index, prompt, self._block_size)
        return self._matched[2]

    def claims(self, found: Match, mode: CacheMode) -> bool:
        """Whether the partial match is a tail that agrees to its end and that nobody holds: it needs no copy.

        A call that keeps nothing copies it, as it would not give it back.
        """
        partial = found.partial
        keeps = mode is CacheMode.DEFAULT
        return partial is not None and keeps and partial.whole_tail and not self._pool.ref_counts[partial.block]

    def match_for(self, prompt: Prompt, mode: CacheMode) -> Match:
        """Match a prompt as its call wishes."""
        return Match([], None, self._block_size) if mode is CacheMode.BYPASS else self.match(prompt)

    def _miss_reason(self, found: Match, prompt: Prompt, mode: CacheMode) -> MissReason:
        if mode is CacheMode.BYPASS:
            return MissReason.BYPASSED
        return miss_reason(found, prompt, self._evictor.evicted_hashes)

    def _has_room(self, account: Account, found: Match, needed: int, mode: CacheMode) -> bool:
        """Whether the tenant can be given all that is needed beyond the hits."""
        return self.demand(found, needed, mode) <= self._allocator.room(account)

    def demand(self, found: Match, needed: int, mode: CacheMode) -> int:
        """Blocks that a call would add to its tenant's, which come out of its room.

        Hits that nobody holds are evictable now and will not be: they are counted out, for the pool and for the cap.
        """
        ref_counts = self._pool.ref_counts
        # References never rise along a path, so the blocks that nobody holds are its end.
        revived = 0
        for block in reversed(found.blocks):
            if ref_counts[block]:
                break
            revived += 1
        if found.partial and not ref_counts[found.partial.block]:
            revived += 1
        held = len(found.blocks) + self.claims(found, mode)
        return needed - held + revived

    def _open_table(self, prompt: Prompt, account: Account, token_ids: list[int], hits: list[int]) -> BlockTable:
        self._pool.hold(hits, account)
        return BlockTable(
            scope=prompt.scope,
            account=account,
            token_ids=token_ids,
            root=self._index.hold_root(prompt.scope),
            scope_digest=prompt.scope_digest,
            reservation=Reservation(0),
            block_ids=list(hits),
            hashes=prompt.hashes,
            contents=prompt.contents,
            num_published=len(hits),
        )

    def _fill_table(self, table: BlockTable, found: Match, mode: CacheMode) -> bool:
        """Give a table the blocks of its prompt beyond the hits. Returns whether a tail was claimed.

        All that is used is held before anything is taken: taking may evict.
        """
        partial, claims = found.partial, self.claims(found, mode)
        if partial:
            self._pool.hold((partial.block,), table.account)
        if partial and claims:
            self._index.discard(partial.block)
            self._evictor.discarded(partial.block)
            table.block_ids.append(partial.block)
        missing = self._allocator.blocks_for(len(table.token_ids)) - len(table.block_ids)
        own = self._allocator.take(missing, table.account)
        if partial and not claims:
            self._planner.add(Copy(partial.block, own[0], partial.tokens), table.account)
        table.block_ids += own
        return claims
