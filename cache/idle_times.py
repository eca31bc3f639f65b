"""How long what is evicted had lain idle, in seconds: the retention of the pool."""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate


class IdleTimes:
    """When each path was last used, noted at its last block only.

    Using a path uses every block on it. So when a leaf goes, its parent takes over the leaf's time where its own is
    older, and has then the time that noting each use at each block would have given it.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # A block that changes hands keeps the time of what it held before: the next use is later than that.
        self._used_at = [0.0] * num_blocks
        self.evicted_seconds_total = 0.0
        """Of all blocks evicted, the times from their last use to their eviction, added up."""

    def used(self, block: int) -> None:
        """A path that ends at this block was used just now."""
        self._used_at[block] = self._clock()

    def evicted(self, chain: Sequence[int], parent: int) -> None:
        """A leaf and its ancestors up to the one below ``parent``, a block or a root, are evicted."""
        used_at = self._used_at
        latest, total = used_at[chain[0]], used_at[chain[0]] * len(chain)
        # Nearly always no path ended above the leaf since, and looking for the last use is all there is to do.
        if max(map(used_at.__getitem__, chain)) > latest:
            times = list(accumulate(map(used_at.__getitem__, chain), max))
            latest, total = times[-1], sum(times)
        # Never less than before, whatever rounding makes of two times that are nearly the same.
        self.evicted_seconds_total += max(0.0, self._clock() * len(chain) - total)
        if parent < len(used_at) and used_at[parent] < latest:
            used_at[parent] = latest
