"""Which evictable block goes first: the seam that policies plug into.

Evictable are the blocks that are published, unreferenced and without children. A *policy* keeps what it observes of
the whole pool; its *queues* order the evictable blocks of one tenant and retention priority each, and their ranks can
be compared, so that a choice between tenants is the policy's too.
"""

from collections.abc import Sequence
from typing import Protocol


class EvictionQueue(Protocol):
    """Some of the evictable blocks, next victim first.

    A block that stops being evictable (it was hit, or got a child) is not reported: the policy asks ``is_evictable``
    when a block comes up, so that a hit on a long path costs nothing here.
    """

    def add(self, block: int, child: int | None = None) -> None:
        """The block is evictable now; where it became so because its last child was evicted, that is ``child``."""

    def rank(self) -> float | None:
        """Rank of the next victim, lower goes first; None where there is none."""

    def pop(self) -> int | None:
        """Take the next victim, or None where there is none."""

    def succeeds(self, parent: int, child: int) -> bool:
        """Whether the evicted child's parent, which is evictable, is the next victim; if so it counts as popped."""

    def order(self) -> list[int]:
        """All blocks, next victim first. For tests and people; sorts."""


class EvictionPolicy(Protocol):
    """What decides, and what it is told. Made with the number of blocks and the question ``is_evictable``."""

    name: str

    def queue(self) -> EvictionQueue:
        """A new, empty queue."""

    def used(self, block: int) -> None:
        """A path that ends at this block was used just now, and with it every block above."""

    def published(self, parent: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """A path of new nodes stands below ``parent``, a root or a block; a hash that was evicted before came back."""

    def tail_kept(self, parent: int, block: int) -> None:
        """A node without a hash stands below ``parent``; it will never be a parent."""

    def discarded(self, block: int) -> None:
        """A node without children left by another way than ``pop`` and ``succeeds``."""

    def evicted(self, hashes: Sequence[bytes]) -> None:
        """Blocks went, leaf first."""
