"""A token bucket: so much per minute, as much at once after a quiet minute."""

from collections.abc import Callable

_MINUTE = 60.0
_ROUNDING_SECONDS = 1e-6
"""Whoever comes back exactly when told to is not sent away for a rounding error."""


class TokenBucket:
    """Fills evenly up to a minute's worth. Two numbers, however many calls draw on it.

    It may be overdrawn when a call turns out to have used more than it had taken: what follows then waits longer, and
    over any long time no more is used than is allowed.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        """Begins full. ``clock`` tells seconds and never goes back."""
        self._clock = clock
        self._capacity = float(per_minute)
        self._level = float(per_minute)
        self._at = clock()

    @property
    def capacity(self) -> int:
        """What a minute allows."""
        return int(self._capacity)

    @property
    def level(self) -> float:
        """What is there now; below zero while it is overdrawn."""
        self._fill()
        return self._level

    def seconds_until(self, amount: float) -> float:
        """Tell when ``amount``, at most the capacity, will be there; 0 where it is."""
        seconds = (amount - self.level) * _MINUTE / self._capacity
        return seconds if seconds > _ROUNDING_SECONDS else 0.0

    def take(self, amount: float) -> None:
        """Take out, or with a negative amount put back, whatever the level is."""
        self._fill()
        self._level = min(self._capacity, self._level - amount)

    def resize(self, per_minute: int) -> None:
        """Allow another amount from now on. What was used up stays used up, as far as a minute's worth: who had a
        thousand times as much before would else pay the difference off for hours.
        """
        self._fill()
        self._level = max(self._level + per_minute - self._capacity, -float(per_minute))
        self._capacity = float(per_minute)

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._capacity / _MINUTE)
        self._at = now
