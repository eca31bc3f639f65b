"""Which decode steps are recorded: few shapes, so that few graphs serve all steps."""

from bisect import bisect_left
from collections.abc import Sequence

from prefixgate.worker.attention_segments import own_segments, shared_segments
from prefixgate.worker.model_runner import Row

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of a graph. A decode step reads all weights whatever its size, so that rows in vain cost little, and at most a
third is. Larger steps have enough to compute for the launches not to show."""

MIN_WIDTH, WIDTH_FACTOR = 64, 4
"""Blocks that a graph's tables have room for: at least so many, and so many times that, up to the longest context.
A backend lays out its work for the whole width and skips what a row does not have, which costs a little each time."""

TABLE_STEP = 16
"""Tables have room for a multiple of so many blocks."""

SHARED_BYTES_OF_A_LAYER = 256 * 1024 * 1024
"""What a step must save each layer by reading shared slots once, for that to be worth more than a graph: launched one
by one a layer's kernels take about 0.1 ms more, in which a fast device reads about that. An estimate."""


def graph_size(rows: int) -> int | None:
    """Return how many rows the graph for a step of ``rows`` has; None where there is none so large."""
    index = bisect_left(SIZES, rows)
    return SIZES[index] if index < len(SIZES) else None


def graph_width(blocks: int, max_blocks: int) -> int:
    """Return for how many blocks the graph for a step's longest table has room, at most ``max_blocks``."""
    width = MIN_WIDTH
    while width < blocks:
        width *= WIDTH_FACTOR
    return min(width, max_blocks)


def is_decode(rows: Sequence[Row]) -> bool:
    """Tell whether each row computes one token, whose logits are wanted."""
    return all(len(row.token_ids) == 1 and row.needs_logits for row in rows)


def saves_by_sharing(rows: Sequence[Row], block_size: int, token_bytes: int, num_layers: int) -> bool:
    """Tell whether a decode step gains more by reading shared slots once than by a graph, which reads all of them."""
    worth = SHARED_BYTES_OF_A_LAYER * num_layers // token_bytes
    starts = [row.start for row in rows]
    if sum(starts) <= worth:
        return False
    own = own_segments([row.block_ids for row in rows], [start + 1 for start in starts], block_size)
    segments = shared_segments(own, starts, block_size)
    return sum((len(segment.rows) - 1) * segment.slots for segment in segments) > worth
