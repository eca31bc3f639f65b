"""Least recently used, among leaves."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush


class LRUPolicy:
    """Evicts the leaf whose path was used longest ago.

    Using a path uses every block on it, so a parent is never older than its children. That lets a use be noted at the
    path's last block only: when a leaf goes, its parent takes over the leaf's time where its own is older, and has
    then exactly the time that noting each use at each block would have given it.

    The order is a heap with lazy deletion. An entry is stale when its block is no longer evictable or was used since;
    stale entries are dropped when they come up, and all at once when they are the larger part. The parent of an
    evicted leaf is mostly the next to go, as the rest of the same path; it is then kept beside the heap, so evicting
    a whole path costs one heap operation and not one for each block.
    """

    name = "lru"

    def __init__(self, num_blocks: int, is_evictable: Callable[[int], bool]) -> None:
        self._is_evictable = is_evictable
        self._clock = 0
        self._used_at = [0] * num_blocks
        self._heap: list[tuple[int, int]] = []
        self._next: int | None = None
        self._compact_at = 64

    def used(self, block: int) -> None:
        self._clock += 1
        self._used_at[block] = self._clock

    def add(self, block: int, child: int | None = None) -> None:
        used_at = self._used_at
        if child is not None:
            if used_at[child] > used_at[block]:
                used_at[block] = used_at[child]
            if self._next is None and (not self._heap or used_at[block] <= self._heap[0][0]):
                self._next = block
                return
        heappush(self._heap, (used_at[block], block))
        if len(self._heap) > self._compact_at:
            self._compact()

    def pop(self) -> int | None:
        block, self._next = self._next, None
        if block is not None:
            if self._is_evictable(block) and (not self._heap or self._used_at[block] <= self._heap[0][0]):
                return block
            heappush(self._heap, (self._used_at[block], block))
        while self._heap:
            time, block = heappop(self._heap)
            if time == self._used_at[block] and self._is_evictable(block):
                return block
        return None

    def order(self) -> list[int]:
        self._compact()
        return [block for _, block in sorted(self._heap)]

    def _compact(self) -> None:
        """Drop stale entries; the next time is when there are twice as many as remain, so the cost is constant."""
        if self._next is not None:
            self._heap.append((self._used_at[self._next], self._next))
            self._next = None
        used_at, is_evictable = self._used_at, self._is_evictable
        self._heap = [entry for entry in set(self._heap) if entry[0] == used_at[entry[1]] and is_evictable(entry[1])]
        heapify(self._heap)
        self._compact_at = max(64, 2 * len(self._heap))
