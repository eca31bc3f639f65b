"""How blocks enter the index: late, once, and in one place for each content."""

from prefixgate.cache.block_pool import BlockPool
from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.events import EventLog
from prefixgate.cache.evictor import Evictor
from prefixgate.cache.hashing import ROOT_HASH, BlockHash, BlockHasher, pack_ids
from prefixgate.cache.prefix_index import NONE, PrefixIndex


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
        hashed = min(full, len(table.hashes))
        if table.num_published < hashed:
            self._publish_prompt(table, hashed)
        while table.num_published < full and table.publishable:
            self._publish_next(table)

    def _publish_prompt(self, table: BlockTable, full: int) -> None:
        """Publish blocks of the prompt, whose hashes are known: mostly all at once."""
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
        self._evictor.policy.tail_kept(parent, block)
        return block

    def _publish_next(self, table: BlockTable) -> None:
        """Publish one block of generated tokens. Its hash is not kept: the next one's parent is in the index.

        Written out for the case that nearly every decoded block is, a first child with a new hash.
        """
        index, position, size = self._index, table.num_published, self._size
        own = table.block_ids[position]
        if position:
            parent = table.block_ids[position - 1]
            parent_hash = index.hashes[parent]
            assert parent_hash is not None, "a published block that has a successor is full"
        else:
            parent, parent_hash = table.root, ROOT_HASH
        content = pack_ids(table.token_ids[position * size : (position + 1) * size])
        block_hash = self._hasher.hash_block(parent_hash, table.scope_digest, content)
        if index.first_child[parent] == NONE and index.find(block_hash) is None:
            index.insert(own, parent, content, block_hash)
            table.num_published = position + 1
        elif not self._publish_one(table, block_hash, content):
            table.publishable = False
            return
        elif table.block_ids[position] != own:
            return
        self._evictor.policy.published(parent, (own,), (block_hash,))
        self._events.stored(table.scope.tenant, parent_hash, (block_hash,))

    def _publish_one(self, table: BlockTable, block_hash: BlockHash, content: bytes) -> bool:
        """Publish a table's next block, or move the table to the block that was published before it.

        Returns False where other content has the hash: then this node cannot be, nor anything below it.
        """
        index, position = self._index, table.num_published
        own = table.block_ids[position]
        parent = table.block_ids[position - 1] if position else table.root
        existing = index.find(block_hash)
        if existing is None:
            if index.first_child[parent] != NONE:
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
            parent = table.block_ids[first - 1] if first else table.root
            self._evictor.policy.published(parent, table.block_ids[first : table.num_published], hashes)
            self._events.stored(table.scope.tenant, table.hashes[first - 1] if first else ROOT_HASH, hashes)
