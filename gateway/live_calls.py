"""The calls in progress: who they are, how old, and when the last of them has ended."""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from prefixgate.gateway.errors import DrainingError

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Call:
    """One call of a client, whichever method."""

    method: str
    tenant: str
    request_id: str
    """The caller's own name for it, or ours. Shown and logged, never looked up by."""
    started_at: float = field(default_factory=time.monotonic)

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.started_at


class LiveCalls:
    """All calls in progress. Draining is a state of this door, not of the calls that are inside."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._is_draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_live(self) -> int:
        """Number of calls in progress. May be read from other threads."""
        return len(self._calls)

    @property
    def oldest_seconds(self) -> float:
        """Age of the oldest call; 0 without any. May be read from other threads."""
        return max((call.age_seconds for call in tuple(self._calls)), default=0.0)

    def enter(self, call: Call) -> None:
        """Take a call in. Raises DrainingError."""
        if self._is_draining:
            raise DrainingError
        self._calls.add(call)
        self._empty.clear()

    def leave(self, call: Call) -> None:
        """Let a call out; nothing for one that was not taken in."""
        self._calls.discard(call)
        if not self._calls:
            self._empty.set()

    async def drain(self, seconds: float) -> None:
        """Take nothing more, and wait until what there is has ended, at most ``seconds``."""
        self._is_draining = True
        if not self._calls:
            return
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            logger.warning("%d calls have not ended within %g seconds and are cut off", self.num_live, seconds)
