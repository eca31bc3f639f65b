"""When something is due for calls: the end of their time, one way or another."""

import heapq
import itertools
from collections.abc import Iterator

from prefixgate.worker.request import Request, RequestState

_SPARE = 64


class Deadlines:
    """The live calls that something is due for, soonest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._order = itertools.count()
        self._prune_at = _SPARE

    def add(self, request: Request, seconds: float | None) -> None:
        """Watch a received call for so long from its receipt; None is for ever."""
        if seconds is None:
            return
        heapq.heappush(self._heap, (request.received_at + seconds, next(self._order), request))
        if len(self._heap) > self._prune_at:
            # Ended calls would otherwise stay in memory until a deadline that can be hours away.
            self._heap = [entry for entry in self._heap if entry[2].state is not RequestState.ENDED]
            heapq.heapify(self._heap)
            self._prune_at = 2 * len(self._heap) + _SPARE

    def is_overdue(self, now: float) -> bool:
        """Whether ``take_overdue`` has any to give."""
        return bool(self._heap) and self._heap[0][0] <= now

    def take_overdue(self, now: float) -> Iterator[Request]:
        """Yield the calls whose time is up, ended ones among them, and forget them."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]
