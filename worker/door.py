"""Which calls are not taken in, and what they are told."""

import math
from collections.abc import Callable

from grpc import StatusCode

from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.limits import Limits
from prefixgate.worker.request import End, RefusedError, Request
from prefixgate.worker.waiting import Line

MAX_RETRY_SECONDS = 60
"""Longest time that a refused call is told to wait: nobody knows what is in an hour."""


class Door:
    """Compares calls with bounds that do not change, so it may be asked from any thread."""

    def __init__(self, cache: PrefixCache, limits: Limits, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._limits = limits
        self._clock = clock

    def check_size(self, request: Request) -> None:
        """Raise RefusedError for a call that can never run here, with the numbers."""
        if request.pin_seconds is not None and not self._cache.pins.limit:
            raise RefusedError(
                StatusCode.INVALID_ARGUMENT,
                f"cache.ttl_seconds: {request.pin_seconds:g} at a worker that allows no pins; leave it unset",
                field="cache.ttl_seconds",
            )
        prompt, new, outputs = len(request.token_ids), request.sampling.max_tokens, request.n
        if outputs > self._limits.max_running:
            raise RefusedError(
                StatusCode.INVALID_ARGUMENT,
                f"n: {outputs} outputs; this worker runs at most {self._limits.max_running}",
                field="n",
            )
        needed = self._cache.blocks_needed(prompt, new, outputs)
        ceiling = self._cache.ceiling(request.scope.tenant)
        if needed > ceiling:
            field = "token_ids" if request.prefill_only else "sampling.max_tokens"
            also = "" if request.prefill_only else f" and {outputs} outputs of up to {new} tokens"
            raise RefusedError(
                StatusCode.INVALID_ARGUMENT,
                f"{field}: {prompt} prompt tokens{also} can need {needed} blocks of {self._cache.block_size} tokens; "
                f"of the pool's {self._cache.num_blocks} the tenant can have {ceiling}",
                field=field,
            )

    def check_line(self, line: Line, unseen: int) -> None:
        """Raise RefusedError for one more call of a tenant that has this line, and calls that no step has seen.

        The bound on the queue is for the step to enforce, which knows who can run at once and whose turn it is. This
        one keeps the inbox from growing while a step takes long.
        """
        if line.calls + unseen >= self._limits.max_waiting + self._limits.max_running:
            raise RefusedError(*self.too_many(line))

    def too_many(self, line: Line) -> End:
        """The end of a call that finds too many before it, with the time that the first of them has waited by now."""
        waited = self._clock() - line.first_received_at if line.calls else 0.0
        seconds = min(max(1, math.ceil(waited)), MAX_RETRY_SECONDS)
        text = f"this worker lets {self._limits.max_waiting} calls wait, and more are; try again in {seconds} seconds"
        return End(StatusCode.RESOURCE_EXHAUSTED, text, seconds)
