"""How blocks enter the index: late, once, and in one place for each content."""

from prefixgate.cache.block_pool import BlockPool
from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.events import EventLog
from prefixgate.cache.evictor import Evictor
from prefixgate.cache.hashing import ROOT_HASH, BlockHash, BlockHasher, pack_ids
from prefixgate.cache.prefix_index import PrefixIndex


class Publisher:
    """Publishes full blocks as nodes, and finished sequences' unfinished blocks as tails.

    Where the same node was published meanwhile, the table moves to its block and lets go of its own (the twin), so
    that equal content has one block and a parent is never referenced less than its children.
    """

    def __init__(
        self, hasher: BlockHasher, pool: BlockPool, index: PrefixIndex, evictor: Evictor, events: EventLog
    ) -> None:
        self._hasher = hasher
        self._size = hasher.block_size
        self._pool = pool
        self._index = index
        self._evictor = evictor
        self._events = events

    def publish(self, table: BlockTable, num_written: int) -> None:
        """Index the blocks that are full now that ``num_written`` slots are. Stops for good at a collision."""
        full = num_written // self._size
        if full <= table.num_published or not table.publishable:
            return
        self._hash_up_to(table, full)
        first, index = table.num_published, self._index
        hashes, contents = table.hashes[first:full], table.contents[first:full]
        parent = table.block_ids[first - 1] if first else table.root
        if index.has_none_of(hashes):
            self._replace_tail(table, parent, contents[0])
            index.insert_chain(table.block_ids[first:full], parent, contents, hashes)
            table.num_published = full
        else:
            own = list(table.block_ids)
            for block_hash, content in zip(hashes, contents, strict=True):
                if not self._publish_one(table, block_hash, content):
                    table.publishable = False
                    break
                # Nodes that exist come before those that do not: a node's parent exists.
                first += table.block_ids[table.num_published - 1] != own[table.num_published - 1]
        self._announce(table, first)

    def keep_tail(self, table: BlockTable, num_written: int) -> int | None:
        """Make a table's unfinished last block a node, where it says something that no sibling says.

        The block must be the table's alone. Returns it, or None where it is not kept.
        """
        written, position = num_written % self._size, num_written // self._size
        if not written or position != table.num_published or not table.publishable:
            return None
        block = table.block_ids[position]
        if self._pool.ref_counts[block] > 1:
            return None
        begin = position * self._size
        content = pack_ids(table.token_ids[begin : begin + written])
        parent = table.block_ids[position - 1] if position else table.root
        sibling = self._index.longest_partial(parent, content)
        if sibling is not None and sibling.tokens == written:
            return None
        self._replace_tail(table, parent, content)
        self._index.insert(block, parent, content, None)
        return block

    def _hash_up_to(self, table: BlockTable, full: int) -> None:
        have, size = len(table.hashes), self._size
        if full <= have:
            return
        contents = self._hasher.split(pack_ids(table.token_ids[have * size : full * size]))
        parent = table.hashes[-1] if table.hashes else ROOT_HASH
        # New lists: the old ones are shared with the prompt and with forks.
        table.hashes = table.hashes + self._hasher.hash_blocks(parent, table.scope_digest, contents)
        table.contents = table.contents + contents

    def _publish_one(self, table: BlockTable, block_hash: BlockHash, content: bytes) -> bool:
        """Publish a table's next block, or move the table to the block that was published before it.

        Returns False where other content has the hash: then this node cannot be, nor anything below it.
        """
        index, position = self._index, table.num_published
        own = table.block_ids[position]
        parent = table.block_ids[position - 1] if position else table.root
        existing = index.find(block_hash)
        if existing is None:
            self._replace_tail(table, parent, content)
            index.insert(own, parent, content, block_hash)
        elif index.parents[existing] == parent and index.contents[existing] == content:
            self._pool.hold((existing,), table.account)
            table.block_ids[position] = existing
            self._pool.release((own,), table.account, published=False)
        else:
            index.collisions_total += 1
            return False
        table.num_published = position + 1
        return True

    def _replace_tail(self, table: BlockTable, parent: int, content: bytes) -> None:
        """Drop the unheld tail that a new child of its parent repeats and goes beyond."""
        sibling = self._index.longest_partial(parent, content)
        if sibling and sibling.whole_tail and not self._pool.ref_counts[sibling.block]:
            self._index.discard(sibling.block)
            self._evictor.discarded(sibling.block)
            self._pool.reclaim([sibling.block], table.account)

    def _announce(self, table: BlockTable, first: int) -> None:
        if table.num_published > first:
            hashes = table.hashes[first : table.num_published]
            self._evictor.policy.published(table.block_ids[first : table.num_published], hashes)
            self._events.stored(table.scope.tenant, table.hashes[first - 1] if first else ROOT_HASH, hashes)
