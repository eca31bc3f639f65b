"""Whether a worker that answers badly is to be left alone for a while."""

import time
from collections.abc import Callable

from prefixgate.gateway.backoff import Backoff

FAILURES = 3
"""Failed calls in a row that eject a worker: one can be the call's own fault."""
EJECTED = Backoff(first=1.0, longest=30.0)


class CircuitBreaker:
    """Closed while calls go well. After ``failures`` in a row it opens; then one call at a time may try, after a pause
    that grows with each try that fails.
    """

    def __init__(
        self,
        *,
        failures: int = FAILURES,
        backoff: Backoff = EJECTED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = failures
        self._backoff = backoff
        self._clock = clock
        self._failures = 0
        self._trips = 0
        self._opens_at = 0.0
        self._trying = False

    @property
    def is_closed(self) -> bool:
        """Whether calls go there as to any other."""
        return self._trips == 0

    @property
    def allows(self) -> bool:
        """Whether a call may be sent now."""
        return self.is_closed or (not self._trying and self._clock() >= self._opens_at)

    def begin(self) -> bool:
        """Note that a call is sent. Returns whether it is the one that tries an open circuit; then ``end`` is due."""
        if self.is_closed or not self.allows:
            return False
        self._trying = True
        return True

    def end(self) -> None:
        """Note that the call that tried is over, whether or not it told anything."""
        self._trying = False

    def succeed(self) -> None:
        """Note that a call was answered."""
        self._failures = self._trips = 0

    def fail(self) -> bool:
        """Note that a call failed by the worker's fault. Returns whether the circuit opened by that."""
        self._failures += 1
        if self._failures < self._limit or (not self.is_closed and not self._trying):
            # Of calls that were under way when it opened nothing new is learned.
            return False
        self._opens_at = self._clock() + self._backoff.delay(self._trips)
        self._trips += 1
        return self._trips == 1
