"""One sequence's page table."""

from dataclasses import dataclass, field

from prefixgate.cache.accounts import Account
from prefixgate.cache.hashing import BlockHash, CacheScope


@dataclass(slots=True)
class Reservation:
    """Blocks that a call was promised at admission and has not taken yet. Shared by the tables of its outputs."""

    remaining: int
    holders: int = 1


@dataclass(eq=False, slots=True)
class BlockTable:
    """Logical block index to block id, for one Sequence, with one reference to each block it names.

    The blocks fall into three runs: ``[0, num_published)`` are nodes of the index and immutable; the ones after are
    this table's own, full or partial; the last may be shared with forks while it is partial, and is then copied
    before it is written.
    """

    scope: CacheScope
    account: Account
    token_ids: list[int]
    """The sequence's own live list, prompt then output. The engine appends, the table reads."""
    root: int
    """The index's node for the scope, parent of first blocks."""
    scope_digest: bytes
    reservation: Reservation
    block_ids: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of leading full blocks, as far as they were computed."""
    contents: list[bytes] = field(default_factory=list)
    """Packed ids of the same blocks."""
    num_published: int = 0
    publishable: bool = True
    """False for calls that keep nothing, and once a block could not enter the index (its hash was taken by other
    content, or its scope was flushed): what follows it would hang in the air."""
    retention: int | None = None
    """Retention priority for the table's blocks; None leaves them as they are."""
    frontier: tuple[int, bytes] | None = None
    """The node that this table is computing next, as (parent block, packed ids), while others may wait for it."""
    released: bool = False

    def forked(self, token_ids: list[int]) -> "BlockTable":
        """A table of the same blocks for a new sequence. Its references are the cache's to take."""
        return BlockTable(
            scope=self.scope,
            account=self.account,
            token_ids=token_ids,
            root=self.root,
            scope_digest=self.scope_digest,
            reservation=self.reservation,
            block_ids=list(self.block_ids),
            hashes=self.hashes,
            contents=self.contents,
            num_published=self.num_published,
            publishable=self.publishable,
            retention=self.retention,
        )
