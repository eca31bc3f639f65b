"""The spans of calls at the worker: queue, match, prefill, decode.

Made when a call has ended, from the times that the engine noted, and outside of the engine's thread.
"""

import logging
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

from grpc import StatusCode
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, Status, set_span_in_context
from opentelemetry.trace import StatusCode as SpanStatus

from prefixgate.proto.tracing import Tracing, context_of
from prefixgate.worker.request import End, Request

logger = logging.getLogger(__name__)

Attributes = dict[str, str | int]

_CALLERS_ENDS = (StatusCode.OK, StatusCode.CANCELLED, StatusCode.INVALID_ARGUMENT)
"""Ends of a call that nothing here is at fault for."""

SAMPLER = ParentBased(ALWAYS_OFF)
"""A worker begins no trace: it goes on with those that its gateways have sampled."""


class CallSpans:
    """Makes the spans of calls whose gateway traces them."""

    def __init__(self, tracing: Tracing, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is the engine's."""
        self._tracing = tracing
        self._clock = clock

    def call_ended(self, request: Request, end: End) -> None:
        """Trace a call that the engine has ended. Does not raise."""
        if not request.traceparent:
            return
        try:
            self._trace(request, end)
        except Exception:
            logger.exception("A call could not be traced")

    def close(self, seconds: float) -> None:
        """Send what is left, and give up after so long. Blocks."""
        self._tracing.close(seconds)

    def _trace(self, request: Request, end: End) -> None:
        # The engine's clock has no date.
        offset = time.time_ns() - int(self._clock() * 1e9)
        span = self._tracing.tracer.start_span(
            "warm" if request.prefill_only else "generate",
            context_of({"traceparent": request.traceparent}),
            SpanKind.SERVER,
            _call_attributes(request, end),
            start_time=offset + int(request.received_at * 1e9),
        )
        if not span.is_recording():
            return
        within = set_span_in_context(span, Context())
        for name, begin, stop, attributes in _phases(request):
            phase = self._tracing.tracer.start_span(
                name, within, attributes=attributes, start_time=offset + int(begin * 1e9)
            )
            phase.end(offset + int(stop * 1e9))
        if end.code not in _CALLERS_ENDS:
            span.set_status(Status(SpanStatus.ERROR))
        span.end(offset + int(request.ended_at * 1e9))


def _call_attributes(request: Request, end: End) -> Attributes:
    attributes: Attributes = {
        "prefixgate.tenant": request.scope.tenant,
        "prefixgate.request_id": request.request_id,
        "prefixgate.preemptions": request.preemptions,
        "rpc.response.status_code": end.code.name,
    }
    if end.code is not StatusCode.OK:
        attributes["error.type"] = end.code.name
    return attributes


def _phases(request: Request) -> Iterator[tuple[str, float, float, Attributes]]:
    """Tell the phases that a call has been through: name, begin and end by the engine's clock, and what came of it.

    They follow each other without a gap. A call that was preempted stays in the phase that it was in.
    """
    usage = request.usage
    found: list[tuple[str, Attributes]] = [
        ("queue", {}),
        (
            "match",
            {
                "prefixgate.usage.block_hit_tokens": usage.block_hit_tokens,
                "prefixgate.usage.partial_copy_tokens": usage.partial_copy_tokens,
                "prefixgate.usage.claimed_tail_tokens": usage.claimed_tail_tokens,
                "prefixgate.miss_reason": request.miss_reason.value,
            },
        ),
        ("prefill", {"prefixgate.computed_tokens": usage.prompt_tokens - usage.cached_tokens}),
        ("decode", {"prefixgate.completion_tokens": usage.completion_tokens, "prefixgate.outputs": request.n}),
    ]
    marks = [request.received_at, request.matching_at, request.admitted_at, request.first_token_at]
    reached = [mark for mark in marks if mark is not None]
    # As many as it came to, of which the last ends with the call.
    for (name, attributes), (begin, stop) in zip(found, pairwise([*reached, request.ended_at]), strict=False):
        yield name, begin, stop, attributes
