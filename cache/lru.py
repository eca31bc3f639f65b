"""Least recently used, among leaves."""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush


class LRUPolicy:
    """Evicts the leaf whose path was used longest ago.

    Using a path uses every block on it, so a parent is never older than its children. That lets a use be noted at the
    path's last block only: when a leaf goes, its parent takes over the leaf's time where its own is older, and has
    then exactly the time that noting each use at each block would have given it.
    """

    name = "lru"

    def __init__(self, num_blocks: int, is_evictable: Callable[[int], bool]) -> None:
        self.is_evictable = is_evictable
        self.used_at = [0] * num_blocks
        """When each block was last the end of a used path, on a clock that ticks with each use."""
        self._clock = 0

    def queue(self) -> "LRUQueue":
        return LRUQueue(self.used_at, self.is_evictable)

    def used(self, block: int) -> None:
        self._clock += 1
        self.used_at[block] = self._clock

    def published(self, parent: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """LRU does not care what came back."""

    def tail_kept(self, parent: int, block: int) -> None:
        """A tail is a node like any other."""

    def discarded(self, block: int) -> None:
        """Entries of what is no longer evictable are dropped when they come up."""

    def evicted(self, hashes: Sequence[bytes]) -> None:
        """LRU does not remember what went."""


class LRUQueue:
    """A heap by time of last use, with lazy deletion.

    An entry is stale when its block is no longer evictable or was used since; stale entries are dropped when they
    come up, and all at once when they are the larger part.
    """

    def __init__(self, used_at: list[int], is_evictable: Callable[[int], bool]) -> None:
        self._used_at = used_at
        self._is_evictable = is_evictable
        self._heap: list[tuple[int, int]] = []
        self._compact_at = 64

    def add(self, block: int, child: int | None = None) -> None:
        if child is not None:
            self._inherit(block, child)
        heappush(self._heap, (self._used_at[block], block))
        if len(self._heap) > self._compact_at:
            self._compact()

    def rank(self) -> float | None:
        while self._heap:
            time, block = self._heap[0]
            if time == self._used_at[block] and self._is_evictable(block):
                return time
            heappop(self._heap)
        return None

    def pop(self) -> int | None:
        if self.rank() is None:
            return None
        return heappop(self._heap)[1]

    def succeeds(self, parent: int, child: int) -> bool:
        self._inherit(parent, child)
        return not self._heap or self._used_at[parent] <= self._heap[0][0]

    def order(self) -> list[int]:
        self._compact()
        return [block for _, block in sorted(self._heap)]

    def _inherit(self, parent: int, child: int) -> None:
        if self._used_at[child] > self._used_at[parent]:
            self._used_at[parent] = self._used_at[child]

    def _compact(self) -> None:
        """Drop stale entries; the next time is when there are twice as many as remain, so the cost is constant."""
        used_at, is_evictable = self._used_at, self._is_evictable
        self._heap = [entry for entry in set(self._heap) if entry[0] == used_at[entry[1]] and is_evictable(entry[1])]
        heapify(self._heap)
        self._compact_at = max(64, 2 * len(self._heap))
