"""What LRU would have hit with the same room: the yardstick of a policy that departs from it."""

from collections import deque


class ShadowLRU:
    """Counts the blocks that LRU would hold now, by the tick of their last use; holds no blocks itself.

    Since LRU keeps whatever was used last, the blocks it holds are those used at or after some tick, and of that tick
    the leading ones of its path. So a use costs a few steps for each run of its path, and nothing for each block.
    """

    def __init__(self) -> None:
        self._blocks = deque([0])  # last used at each tick, from the first that LRU still holds any of
        self._first = 0
        self._held = 0  # their sum

    def use(self, now: int, runs: list[tuple[int, int]], room: int) -> int:
        """Note a use of a path at tick ``now``, one later than the last.

        ``runs`` are (tick of the use before, blocks), with tick 0 for new content; ``room`` is the number of blocks
        that LRU may hold from now on. Returns how many of the path's blocks LRU held.
        """
        hits = 0
        for used_at, blocks in runs:
            if used_at > 0 and used_at >= self._first:
                at_tick = used_at - self._first
                kept = min(blocks, self._blocks[at_tick])
                self._blocks[at_tick] -= kept
                self._held -= kept
                hits += kept
        self._blocks.append(sum(blocks for _, blocks in runs))
        self._held += self._blocks[-1]
        assert self._first + len(self._blocks) == now + 1, "each tick is noted once"
        self._shrink(room)
        return hits

    def drop(self, used_at: int) -> None:
        """Forget one block that was taken out of the cache on purpose."""
        if used_at >= self._first and self._blocks[used_at - self._first]:
            self._blocks[used_at - self._first] -= 1
            self._held -= 1

    def _shrink(self, room: int) -> None:
        while self._held > room:
            excess = self._held - room
            if self._blocks[0] > excess or len(self._blocks) == 1:
                self._blocks[0] -= excess
                self._held -= excess
            else:
                self._held -= self._blocks.popleft()
                self._first += 1
