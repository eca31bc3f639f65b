"""Which evictable block goes first: the seam that policies plug into."""

from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the *evictable* blocks: published, unreferenced, without children.

    The owner calls ``used`` whenever a sequence lets go of a path of blocks, ``add`` when a block becomes evictable,
    and ``pop`` to take one. A block that stops being evictable (it was hit, or got a child) is not reported:
    ``is_evictable`` is asked when a block is about to be handed out, so that a hit on a long path costs nothing here.
    """

    name: str

    def used(self, block: int) -> None:
        """A path that ends at this block was used just now, and with it every block above."""

    def add(self, block: int, child: int | None = None) -> None:
        """The block is evictable now; where it became so because its last child was evicted, that is ``child``."""

    def pop(self) -> int | None:
        """Take the block to evict next, or None where there is none."""

    def order(self) -> list[int]:
        """All evictable blocks, next to go first. For tests and people; sorts."""
