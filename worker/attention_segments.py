"""Which slots the rows of a step attend to, and which of them several rows attend to at once.

Tables that begin with the same physical blocks begin with the same keys and values. Such a beginning becomes one
segment of all its rows: its keys and values are read once for all of their queries, and what came of it is merged with
what came of each row's rest. Prefixes of prefixes nest: a system prompt that all share, a document that some share.

Time is linear in the blocks named by the tables: each level of nesting looks only at what the level before left over.
"""

from collections.abc import Sequence
from typing import NamedTuple

MIN_SHARED_BLOCKS = 4
"""Shorter common beginnings are left to each row: merging would cost what reading them once saves."""


class Segment(NamedTuple):
    """A run of slots, and the rows whose tokens attend to it."""

    rows: tuple[int, ...]
    position: int
    """Of its first slot; a multiple of the block size."""
    slots: int
    block_ids: Sequence[int]


def own_segments(tables: Sequence[Sequence[int]], lengths: Sequence[int], block_size: int) -> list[Segment]:
    """Make one segment of each row's written slots."""
    return [
        Segment((index,), 0, length, table[: -(-length // block_size)])
        for index, (table, length) in enumerate(zip(tables, lengths, strict=True))
    ]


def shared_segments(own: Sequence[Segment], starts: Sequence[int], block_size: int) -> list[Segment]:
    """Split rows' own segments so that what several rows begin with stands in one segment of all of them.

    ``starts`` are the positions of the rows' first tokens: only blocks that lie wholly before them are shared, since
    those are the ones that each token of a row sees whole.
    """
    segments: list[Segment] = []
    # Rows that agree up to a block, and the block from which on their slots are in no segment yet.
    groups = [(list(range(len(own))), 0)]
    while groups:
        members, begin = groups.pop()
        if len(members) > 1:
            stop = begin + _common_blocks([own[i].block_ids[begin : starts[i] // block_size] for i in members])
            if stop - begin >= MIN_SHARED_BLOCKS:
                blocks = own[members[0]].block_ids[begin:stop]
                segments.append(Segment(tuple(members), begin * block_size, len(blocks) * block_size, blocks))
                begin = stop
            branches: dict[int, list[int]] = {}
            for i in members:
                # A row that ends its shareable blocks here goes on alone: no block has a negative number.
                key = own[i].block_ids[stop] if starts[i] // block_size > stop else -1 - i
                branches.setdefault(key, []).append(i)
            groups.extend((branch, begin) for branch in branches.values())
        else:
            segments.append(_rest(own[members[0]], begin, block_size))
    return segments


def _rest(own: Segment, begin: int, block_size: int) -> Segment:
    return Segment(own.rows, begin * block_size, own.slots - begin * block_size, own.block_ids[begin:])


def _common_blocks(tables: Sequence[Sequence[int]]) -> int:
    """Return with how many equal blocks all tables begin."""
    first = tables[0]
    common = min(len(table) for table in tables)
    for table in tables[1:]:
        if first[:common] != table[:common]:
            common = next(i for i in range(common) if first[i] != table[i])
    return common
