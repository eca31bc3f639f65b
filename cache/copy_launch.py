"""How a plan's copies become one launch: which entry of the kernel, how large a grid, which arguments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prefixgate.cache.copy_plan import Copy

THREADS = 256
"""Threads of a thread block, as the kernel is bounded to."""

ACCESSES_IN_FLIGHT = 4
"""Accesses that the kernel's threads have under way at once."""

VECTOR_BYTES = 16
MAX_BLOCK_BYTES = (1 << 31) - 1
"""The kernel counts within a block in 32 bits."""

_MAX_GRID_Y = 65_535
_THREAD_BLOCKS_PER_PROCESSOR = 64
"""About a dozen rounds of what one runs at once: the last, which leaves some idle, is a small part of the work then."""

MAX_ROUNDS = 4
"""How often a thread goes round its loop at most. With longer slices more pairs are under way at the same time, over
more pages of memory than a device keeps the translations of."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block as the kernel sees it: rows of bytes, one for each (layer, k|v)."""

    rows: int
    row_bytes: int
    token_bytes: int
    """Bytes of one token in one row."""

    def __post_init__(self) -> None:
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise ValueError(
                f"a block of {self.block_bytes:,} bytes: the copy kernel takes at most {MAX_BLOCK_BYTES:,}"
            )

    @property
    def block_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.row_bytes // self.token_bytes


@dataclass(frozen=True, slots=True)
class CopyLaunch:
    """One launch of the kernel, but for the addresses of pool and table."""

    entry: str
    """Name of the kernel's entry point."""

    grid: tuple[int, int, int]
    arguments: tuple[int, int, int, int]
    """What follows the two addresses: pairs, rows, bytes of a row, bytes of a token in it; each 64 bits wide."""


def check_copies(copies: Sequence[Copy], num_blocks: int, block_size: int) -> None:
    """Raise IndexError where a copy names what is not in the pool: a device would write there all the same."""
    for copy in copies:
        if not (0 <= copy.src < num_blocks and 0 <= copy.dst < num_blocks):
            raise IndexError(f"{copy}: src and dst must be from 0 to {num_blocks - 1}")
        if not 0 <= copy.tokens <= block_size:
            raise IndexError(f"{copy}: tokens must be from 0 to {block_size}")


def plan_launch(copies: Sequence[Copy], shape: BlockShape, pool_address: int, processors: int) -> CopyLaunch:
    """Plan the launch that runs copies, at least one, on a device of so many multiprocessors.

    A pair is cut into slices: as many as fill the device some times over, and as many as keep each short. No slice gets
    less than every thread can have under way at once.
    """
    vectors = pool_address % VECTOR_BYTES == 0 and shape.row_bytes % VECTOR_BYTES == 0
    unit = VECTOR_BYTES if vectors else 1
    largest = max(copy.tokens for copy in copies) * shape.token_bytes * shape.rows
    useful = math.ceil(largest / (unit * THREADS * ACCESSES_IN_FLIGHT))
    filling = math.ceil(processors * _THREAD_BLOCKS_PER_PROCESSOR / len(copies))
    wanted = max(filling, math.ceil(useful / MAX_ROUNDS))
    return CopyLaunch(
        entry="copy_vectors" if vectors else "copy_bytes",
        grid=(max(1, min(wanted, useful)), min(len(copies), _MAX_GRID_Y), 1),
        arguments=(len(copies), shape.rows, shape.row_bytes, shape.token_bytes),
    )
