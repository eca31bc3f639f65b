"""Evictable runs in the order of their last use, with both ends at hand."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from prefixgate.cache.runs import Run


class RunEnds:
    """Two heaps with lazy deletion.

    An entry is stale when its run is no longer evictable, was used since, or was added elsewhere; stale entries are
    dropped when they come up, and all at once when they are the larger part.
    """

    def __init__(self, is_evictable: Callable[[int], bool]) -> None:
        self._is_evictable = is_evictable
        self._oldest: list[tuple[int, int, Run]] = []
        self._youngest: list[tuple[int, int, Run]] = []
        self._compact_at = 64

    def add(self, run: Run) -> bool:
        """Add a run whose last block is evictable. Returns False where it stood here already."""
        if run.queue is self and run.queued_at == run.used_at:
            return False
        run.queue, run.queued_at = self, run.used_at
        heappush(self._oldest, (run.used_at, run.number, run))
        heappush(self._youngest, (-run.used_at, run.number, run))
        if len(self._oldest) > self._compact_at or len(self._youngest) > self._compact_at:
            self._compact()
        return True

    def oldest(self) -> Run | None:
        return self._first(self._oldest)

    def youngest(self) -> Run | None:
        return self._first(self._youngest)

    def runs(self) -> list[Run]:
        """All of them, oldest first."""
        self._compact()
        return [run for _, _, run in sorted(self._oldest)]

    def holds(self, run: Run) -> bool:
        """Whether a run stands here. One that is not evictable has to be added again when it is."""
        if run.queue is not self or run.queued_at != run.used_at:
            return False
        if run.blocks and self._is_evictable(run.blocks[-1]):
            return True
        run.queued_at = -1
        return False

    def _first(self, heap: list[tuple[int, int, Run]]) -> Run | None:
        while heap:
            used_at, _, run = heap[0]
            if abs(used_at) == run.used_at and self.holds(run):
                return run
            heappop(heap)
        return None

    def _compact(self) -> None:
        """The next time is when there are twice as many entries as remain, so the cost of each is constant."""
        runs = {run for used_at, _, run in self._oldest if used_at == run.used_at and self.holds(run)}
        self._oldest = [(run.used_at, run.number, run) for run in runs]
        self._youngest = [(-run.used_at, run.number, run) for run in runs]
        heapify(self._oldest)
        heapify(self._youngest)
        self._compact_at = max(64, 2 * len(self._oldest))
