"""Whether a step goes on for so long that it will not end."""

import asyncio
import math
from collections.abc import Awaitable, Callable

_BEAT_SECONDS = 1.0


class StepWatch:
    """Looks at the engine's thread from the event loop, as a step that hangs in native code can tell nobody itself.

    Time counts by the loop's own turns and not by the clock: where the whole process stood still, because it was
    stopped or its machine had no time for it, the step has not had that time either.
    """

    def __init__(
        self,
        current_step: Callable[[], int | None],
        most_seconds: float,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``current_step`` numbers the step that runs, None between two; 0 ``most_seconds`` let one take any time."""
        self._current_step = current_step
        self._most_beats = math.ceil(most_seconds / _BEAT_SECONDS)
        self._sleep = sleep

    async def until_stuck(self) -> None:
        """Return once one step has run for longer than it may. Never, where that is not bounded."""
        seen, beats = None, 0
        while not self._most_beats or beats <= self._most_beats:
            await self._sleep(_BEAT_SECONDS)
            step = self._current_step()
            beats = beats + 1 if step is not None and step == seen else 0
            seen = step
