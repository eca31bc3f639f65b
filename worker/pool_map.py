"""The pool as a map: cells of equally many blocks, each told in a few numbers.

Taking the picture and drawing the map are two steps. The first runs on the engine's thread and only copies; the second
counts, and can run on any.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixgate.cache.prefix_cache import PrefixCache

MAX_EXAMINED = 1 << 16
"""Blocks that are looked at. Of larger pools it is every second one, every third one, and so on, so that the engine
stands still for a few milliseconds at most however large its pool is."""

Numbers = npt.NDArray[np.int64]


class PoolPicture(NamedTuple):
    """Blocks of a pool at one moment: all of them, or every so manieth."""

    stride: int
    """Which: those whose ids it divides."""
    ref_counts: list[int]
    owners: list[int]
    """As in ``BlockPool``; 0 is a free block."""
    pinned: list[int]
    """Ids of the blocks that pins hold, also of those that are not looked at."""

    @classmethod
    def of(cls, cache: PrefixCache) -> "PoolPicture":
        """Take the picture. On the engine's thread."""
        stride = -(-cache.num_blocks // MAX_EXAMINED)
        pool = cache.pool
        return cls(stride, pool.ref_counts[::stride], pool.owners[::stride], list(cache.pins.counts()))


class PoolMap(NamedTuple):
    """A drawn picture: blocks looked at, by cell, and how they are shared."""

    blocks_per_cell: int
    stride: int
    free: list[int]
    active: list[int]
    cached: list[int]
    pinned: list[int]
    holders: list[int]
    """Of each cell, the most that one block has."""
    owners: list[int]
    """Of each cell, the number of the account that has most blocks; 0 where all are free."""
    sharing: list[int]
    """Blocks with one holder, two, three or four, five to eight, and so on."""


def draw(picture: PoolPicture, max_cells: int) -> PoolMap:
    """Count a picture into at most so many cells."""
    counts = np.array(picture.ref_counts, dtype=np.int64)
    owners = np.array(picture.owners, dtype=np.int64)
    examined = len(counts)
    width = -(-examined // max_cells)
    starts = np.arange(0, examined, width)
    active = counts > 0
    cached = ~active & (owners > 0)
    pinned = np.zeros(examined, dtype=bool)
    ids = np.array(picture.pinned, dtype=np.int64)
    pinned[ids[ids % picture.stride == 0] // picture.stride] = True

    def by_cell(blocks: npt.NDArray[np.bool_]) -> list[int]:
        return _listed(np.add.reduceat(blocks, starts, dtype=np.int64))

    return PoolMap(
        blocks_per_cell=width * picture.stride,
        stride=picture.stride,
        free=by_cell(~active & ~cached),
        active=by_cell(active),
        cached=by_cell(cached),
        pinned=by_cell(pinned),
        holders=_listed(np.maximum.reduceat(counts, starts)),
        owners=_commonest(owners, width),
        sharing=_sharing(counts[active]),
    )


def _commonest(owners: Numbers, width: int) -> list[int]:
    """Name the commonest owner of each cell, free blocks apart; of equally common ones the lowest."""
    taken = np.flatnonzero(owners)
    found = np.zeros(-(-len(owners) // width), dtype=np.int64)
    many = int(owners.max(initial=0)) + 1
    keys, counts = np.unique(taken // width * many + owners[taken], return_counts=True)
    # Rising by count, and falling by number among equals: what is written last stays.
    order = np.lexsort((-keys, counts))
    found[keys[order] // many] = keys[order] % many
    return _listed(found)


def _sharing(holders: Numbers) -> list[int]:
    if not len(holders):
        return []
    # 1 → 0, 2 → 1, 3 and 4 → 2, 5 to 8 → 3: the bits of one less.
    return _listed(np.bincount(np.ceil(np.log2(holders)).astype(np.int64)))


def _listed(numbers: Numbers) -> list[int]:
    listed: list[int] = numbers.tolist()
    return listed
