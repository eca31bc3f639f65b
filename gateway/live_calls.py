"""The calls in progress: who they are, how old, and when the last of them has ended."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from prefixgate.gateway.call_record import CallRecord
from prefixgate.gateway.call_trace import UNTRACED, CallTrace
from prefixgate.gateway.errors import CallError, DrainingError
from prefixgate.gateway.quota import Charge

logger = logging.getLogger(__name__)

BUSY_SECONDS = 1.0
"""When some call has waited so long for its first token, whoever comes now is to expect the same."""


@dataclass(eq=False, slots=True)
class Call:
    """One call of a client, whichever method."""

    method: str
    tenant: str
    request_id: str
    """The caller's own name for it, or ours. Shown and logged, never looked up by."""
    started_at: float = field(default_factory=time.monotonic)
    charge: Charge = field(default_factory=Charge)
    """What it may ask for, and what it uses of its tenant's quota."""
    awaits_token: bool = False
    """Whether it wants tokens and has not got the first one yet."""
    cut_off_by: CallError | None = None
    """Why the gateway itself ended it, where it did."""
    trace: CallTrace = UNTRACED
    record: CallRecord = field(default_factory=CallRecord)
    task: "asyncio.Task[Any] | None" = field(default_factory=asyncio.current_task)
    """What runs it."""

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

    @property
    def num_waiting(self) -> int:
        """Number of calls that wait for their first token. May be read from other threads."""
        return sum(call.awaits_token for call in tuple(self._calls))

    @property
    def longest_wait_seconds(self) -> float:
        """Age of the oldest of these; 0 without any. May be read from other threads."""
        return max((call.age_seconds for call in tuple(self._calls) if call.awaits_token), default=0.0)

    def all(self) -> tuple[Call, ...]:
        """List the calls in progress, in no order. May be read from other threads."""
        return tuple(self._calls)

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

    def cut_off(self) -> None:
        """End every call that is left, each with a status: its client hears that, and not of a connection reset."""
        self._is_draining = True
        for call in self._calls:
            if call.task is not None:
                call.cut_off_by = DrainingError()
                call.task.cancel()
