"""The attempts of one call: how much time is left, and whether and when to try again."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from prefixgate.gateway.client.errors import GatewayError, OverloadedError, UnavailableError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a call is made, and how long it waits in between.

    Only a call that was turned away (UNAVAILABLE or RESOURCE_EXHAUSTED) is made again, and only while nothing of its
    answer has come. The wait doubles from attempt to attempt, less up to half of it by chance, and is never shorter
    than the gateway asked for.
    """

    attempts: int = 3
    """All together; 1 never tries again."""
    first_seconds: float = 0.1
    max_seconds: float = 5.0
    """Longest wait. Where the gateway asks for more the call fails at once, as its caller knows better what to do."""

    def __post_init__(self) -> None:
        """Raise ValueError for a policy that makes no sense."""
        if self.attempts < 1:
            raise ValueError(f"attempts: {self.attempts} is out of range; must be at least 1")
        if not 0 <= self.first_seconds <= self.max_seconds:
            raise ValueError(
                f"first_seconds: {self.first_seconds} is out of range; must be in [0, max_seconds], "
                f"here [0, {self.max_seconds}]"
            )


class Attempts:
    """The attempts of one call, against one deadline."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """``timeout`` is for all attempts and waits together, in seconds."""
        self._policy = policy
        self._clock = clock
        self._chance = chance
        self._deadline = None if timeout is None else clock() + timeout
        self._made = 1

    def remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def wait_after(self, error: GatewayError) -> float | None:
        """Tell how many seconds to wait before the next attempt; None where there is none."""
        policy = self._policy
        if not isinstance(error, UnavailableError | OverloadedError) or self._made >= policy.attempts:
            return None
        wait = min(policy.max_seconds, policy.first_seconds * 2.0 ** (self._made - 1)) * (1 - self._chance() / 2)
        if error.retry_delay is not None:
            wait = max(wait, error.retry_delay)
        remaining = self.remaining()
        if wait > policy.max_seconds or (remaining is not None and wait >= remaining):
            return None
        self._made += 1
        return wait
