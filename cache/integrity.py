"""The invariants of the cache, stated once and checked as a whole.

Tests check after every operation, the engine when it goes idle. What is checked here is what the rest of the code may
rely on, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prefixgate.cache.prefix_index import NONE

if TYPE_CHECKING:
    from prefixgate.cache.prefix_cache import PrefixCache


class IntegrityError(Exception):
    """An invariant does not hold, and which."""


def check_integrity(cache: PrefixCache) -> None:
    """Check the cache. Raises IntegrityError with a sentence about the first invariant that does not hold."""
    _check_references(cache)
    _check_states(cache)
    _check_tree(cache)
    _check_tables(cache)
    _check_accounts(cache)
    _check_eviction(cache)


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise IntegrityError(sentence)


def _check_references(cache: PrefixCache) -> None:
    """Each block is referenced exactly by the tables that list it and the copies that read it."""
    expected = Counter(block for table in cache.tables() for block in table.block_ids)
    expected.update(copy.src for copy in cache.planned_copies())
    expected.update(block for pin in cache.pins.all() for block in pin.blocks)
    listed = {block for table in cache.tables() for block in table.block_ids}
    for copy in cache.planned_copies():
        _require(copy.dst in listed, f"a copy is planned into block {copy.dst}, which no table lists")
    for block, count in enumerate(cache.pool.ref_counts):
        _require(count == expected[block], f"block {block} has {count} references and is held {expected[block]} times")


def _check_states(cache: PrefixCache) -> None:
    """Free, active and cached part the pool, and each block is where its references and its node say."""
    pool, index = cache.pool, cache.index
    free = set(pool.free_blocks())
    _require(len(free) == pool.num_free, "a block is twice on the free list")
    cached = 0
    for block in range(pool.num_blocks):
        held, node = pool.ref_counts[block] > 0, index.is_node(block)
        _require((block in free) == (not held and not node), f"block {block}: free, held {held}, node {node}")
        cached += node and not held
    _require(cached == pool.num_cached, f"{cached} blocks are cached and {pool.num_cached} are counted")


def _check_tree(cache: PrefixCache) -> None:
    """Links agree in both directions, hashes are right and unique, tails are leaves, parents outlive children."""
    index, pool, width = cache.index, cache.pool, cache.block_size * 4
    reached: set[int] = set()
    for root in index.roots():
        digest = cache.hasher.scope_digest(index.scope_of(root))
        pending = list(index.children(root))
        while pending:
            node = pending.pop()
            _require(node not in reached, f"node {node} is reached twice")
            reached.add(node)
            parent, content, block_hash = index.parents[node], index.contents[node], index.hashes[node]
            children = list(index.children(node))
            _require(all(index.parents[child] == node for child in children), f"a child of {node} has another parent")
            if block_hash is None:
                _require(0 < len(content) < width and not children, f"tail {node} is not a partial leaf")
            else:
                above = index.hashes[parent] if parent < pool.num_blocks else bytes(16)
                _require(above is not None, f"node {node} stands under a tail")
                assert above is not None
                right = cache.hasher.hash_block(type(block_hash)(above), digest, content)
                _require(block_hash == right, f"node {node} does not carry the hash of its content")
                found = index.find(block_hash) == node
                _require(found != index.is_detached(root), f"node {node}: found by its hash {found}")
                _require(len(content) == width, f"full node {node} holds {len(content)} bytes of ids")
            below = sum(pool.ref_counts[child] for child in children if not index.is_tail(child))
            if parent < pool.num_blocks:
                held = pool.ref_counts[node] > 0 and not index.is_tail(node)
                _require(pool.ref_counts[parent] > 0 or not held, f"node {node} is held and its parent is not")
            _require(pool.ref_counts[node] >= below, f"node {node} is referenced less than its children")
            pending += children
    nodes = {block for block in range(pool.num_blocks) if index.parents[block] != NONE}
    _require(nodes == reached, f"nodes {sorted(nodes ^ reached)} cannot be reached from a root")
    attached = [root for root in index.roots() if not index.is_detached(root)]
    full = sum(1 for root in attached for node in index.walk(root) if index.hashes[node] is not None)
    _require(len(index) == full, f"{len(index)} hashes are indexed for {full} full nodes")


def _check_tables(cache: PrefixCache) -> None:
    """A table's published run is a path of the tree that says its tokens; promises are kept."""
    index, size = cache.index, cache.block_size
    promised = {id(table.reservation): table.reservation.remaining for table in cache.tables()}
    stats = cache.stats()
    _require(sum(promised.values()) == stats.reserved_blocks, "the reservations do not add up")
    _require(stats.reserved_blocks <= stats.free_blocks + stats.cached_blocks, "more is promised than there is")
    for table in cache.tables():
        _require(not table.released, "a released table is still known")
        _require(len(set(table.block_ids)) == len(table.block_ids), "a table names a block twice")
        above = table.root
        for position, block in enumerate(table.block_ids):
            if position < table.num_published:
                _require(index.parents[block] == above, f"block {block} is not the child of the one before it")
                ids = table.token_ids[position * size : (position + 1) * size]
                _require(index.contents[block] == b"".join(i.to_bytes(4, "little") for i in ids), "a table's tokens")
            else:
                _require(not index.is_node(block), f"block {block} is published and its table does not know")
            above = block


def _check_accounts(cache: PrefixCache) -> None:
    """Each tenant's counts are those of its blocks and promises; floors and caps are kept."""
    owners = {block: table.account for table in cache.tables() for block in table.block_ids}
    for copy in cache.planned_copies():
        # A source whose holders are all gone is the plan's alone, and its tenant that of the copy.
        owners.setdefault(copy.src, owners[copy.dst])
    for root in cache.index.roots():
        account = cache.accounts.of(cache.index.scope_of(root).tenant)
        owners.update(dict.fromkeys(cache.index.walk(root), account))
    held = [block for block, count in enumerate(cache.pool.ref_counts) if count]
    idle = [block for block in owners if not cache.pool.ref_counts[block]]
    active = Counter(owners[block].tenant for block in held if block in owners)
    cached = Counter(owners[block].tenant for block in idle)
    promised: Counter[str] = Counter()
    for table, reservation in {id(t.reservation): (t, t.reservation) for t in cache.tables()}.values():
        promised[table.account.tenant] += reservation.remaining
    for block, noted in enumerate(cache.pool.owners):
        number = owners[block].number if block in owners else 0
        _require(noted == number, f"block {block} is noted as of account {noted} and is {number}'s")
    for account in cache.accounts:
        name = account.tenant
        counted = (account.active, account.cached, account.promised)
        is_so = (active[name], cached[name], promised[name])
        _require(counted == is_so, f"tenant {name} is counted as {counted} and has {is_so}")
        _require(account.held <= account.cap, f"tenant {name} holds {account.held} of {account.cap}")
        pinned = len({block for pin in cache.pins.of(name) for block in pin.blocks})
        is_counted = cache.pins.num_blocks_of(name)
        _require(is_counted == pinned, f"tenant {name} has {pinned} pinned blocks and is counted {is_counted}")


def _check_eviction(cache: PrefixCache) -> None:
    """The evictor knows exactly the blocks that may be evicted, each once."""
    pool = cache.pool
    order = [block for account in cache.accounts for block in cache.evictor.order(account)]
    evictable = {block for block in range(pool.num_blocks) if cache.evictor.is_evictable(block)}
    _require(len(order) == len(set(order)), "a block stands twice in the eviction order")
    _require(set(order) == evictable, f"blocks {sorted(set(order) ^ evictable)}: evictable or in the order, not both")
