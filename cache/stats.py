"""How a cache stands, in figures taken together."""

from typing import NamedTuple


class CacheStats(NamedTuple):
    """The cache at this moment, in blocks, and what it did since it was made."""

    total_blocks: int
    free_blocks: int
    active_blocks: int
    cached_blocks: int
    reserved_blocks: int
    pinned_blocks: int
    evictions_total: int
    evicted_idle_seconds_total: float
    """From their last use to their eviction, of all of these added up."""
    copies_total: int
    collisions_total: int
