"""Whether an event loop still turns, as other threads see it."""

import asyncio
import time
from collections.abc import Callable

_BEAT_SECONDS = 1.0

STUCK_SECONDS = 60.0
"""Without a beat for so long a loop is held to be stuck, not busy: it would have to be without a turn all that time."""


class Pulse:
    """Beats on the event loop. A process whose loop is stuck answers no call, while its other threads seem well."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat_at = clock()

    @property
    def is_stuck(self) -> bool:
        """Whether the loop should be given up. May be read from other threads."""
        return self._clock() - self._beat_at > STUCK_SECONDS

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self._beat_at = self._clock()
            await asyncio.sleep(_BEAT_SECONDS)
