"""Stretches of a path that have always been used together, so that what is known of one block is known of all."""

from collections.abc import Sequence

NO_BLOCK = -1


class Run:
    """Consecutive nodes of one path with one history: used at the same times, without a fork in between.

    ``blocks`` are those of its nodes that are cached, from the first on; ``hashes`` name all of its nodes, also those
    that were evicted and are remembered. Only the last cached block can be a leaf.
    """

    __slots__ = (
        "blocks",
        "growing",
        "hashes",
        "number",
        "pace",
        "parent",
        "queue",
        "queued_at",
        "remembered_as",
        "used_at",
    )

    def __init__(self, number: int, parent: int, blocks: list[int], hashes: list[bytes | None]) -> None:
        self.number = number
        """Unique; for an order among runs where there is no other."""
        self.parent = parent
        """The block above the first one, of another run; NO_BLOCK at a root."""
        self.blocks = blocks
        self.hashes = hashes
        """None only for a tail, which has no hash and is always last."""
        self.used_at = 0
        """0 until the sequence that publishes it lets go."""
        self.pace = 0
        self.growing = True
        """Whether what is published below its last block was used with it so far: no use ended there, nothing forks."""
        self.queue: object = None
        self.queued_at = -1
        """The ``used_at`` with which it stands in its queue; -1 where it stands in none."""
        self.remembered_as: bytes | None = None
        """The hash of its first evicted node, under which the directory of evicted runs holds it."""

    @property
    def num_evicted(self) -> int:
        return len(self.hashes) - len(self.blocks)


def num_common(first: Sequence[bytes | None], second: Sequence[bytes]) -> int:
    """Count the leading hashes in common. Hashes are chained, so bisection would do; but mostly all are equal."""
    shorter = min(len(first), len(second))
    # As lists: a list is never equal to a tuple.
    if list(first[:shorter]) == list(second[:shorter]):
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])
