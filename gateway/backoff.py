"""Pauses between attempts."""

import random
from typing import NamedTuple


class Backoff(NamedTuple):
    """Seconds to wait between attempts: doubled from ``first`` to ``longest``, each cut at random."""

    first: float = 0.1
    longest: float = 5.0

    def delay(self, attempt: int) -> float:
        """Return the pause after a number of failures in a row, the first of them being 0."""
        # The exponent is bounded, as a float's is.
        return min(self.longest, self.first * 2.0 ** min(attempt, 30)) * random.uniform(0.5, 1)
