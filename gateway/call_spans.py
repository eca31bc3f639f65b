"""The spans of calls at the gateway, by OpenTelemetry's conventions for RPC and for generative AI.

No attribute holds text of a prompt or an answer, a stop string, a salt or a credential.
"""

import logging
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal, get_args

import grpc
from opentelemetry.context import Context as Parent
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, get_current_span, set_span_in_context

from prefixgate.config.address import parse_address
from prefixgate.gateway.auth import Metadata
from prefixgate.gateway.call_record import CallRecord
from prefixgate.gateway.call_trace import UNTRACED, AttemptTrace, CallTrace, Context
from prefixgate.gateway.candidate import Choice
from prefixgate.gateway.live_calls import Call
from prefixgate.proto import worker_pb2
from prefixgate.proto.tracing import Tracing, context_of, traceparent_of

logger = logging.getLogger(__name__)

_Named = Literal["max_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty"]
"""What a call can say of sampling and the conventions have names for."""
Attributes = dict[str, str | int | float | bool | list[str]]

PROVIDER = "prefixgate"
_SERVICE = "prefixgate.v1.Gateway"
_SERVERS_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Statuses that make the span of a server an error; the others are its client's affair."""
_CARRIED = ("traceparent", "tracestate")
"""The second is text of the client's choice, up to kilobytes of it in each span: only of one who is trusted."""


def sampler_of(sample_ratio: float) -> ParentBased:
    """Make what decides which calls are traced: the parent where there is one, else chance."""
    return ParentBased(TraceIdRatioBased(sample_ratio))


class CallSpans:
    """Traces of all calls, sampled."""

    def __init__(self, tracing: Tracing, *, trust_clients: bool) -> None:
        """``trust_clients`` tells whether a client's trace is continued, sampled or not as the client says."""
        self._tracing = tracing
        self._trust_clients = trust_clients

    def begin(self, method: str, context: Context) -> CallTrace:
        """Begin with a call. One that is not sampled costs nothing from here on, at the worker neither."""
        with _Harmless():
            parent, links = self._origin(context.invocation_metadata() or ())
            span = self._tracing.tracer.start_span(f"{_SERVICE}/{method}", parent, SpanKind.SERVER, links=links)
            if span.is_recording():
                span.set_attributes({"rpc.system.name": "grpc", "rpc.method": f"{_SERVICE}/{method}"})
                return _Traced(self._tracing, span)
        return UNTRACED

    def close(self, seconds: float) -> None:
        """Send what is left, and give up after so long. Blocks."""
        self._tracing.close(seconds)

    def _origin(self, metadata: Metadata) -> tuple[Parent, list[Link]]:
        carried = _CARRIED if self._trust_clients else _CARRIED[:1]
        named = {key: value for key, value in metadata if key in carried and isinstance(value, str)}
        parent = context_of(named)
        if self._trust_clients:
            return parent, []
        # Not its trace id either, by which chance decides: whoever chooses that chooses what is sampled.
        client = get_current_span(parent).get_span_context()
        return Parent(), [Link(client)] if client.is_valid else []


class _Traced:
    """One call that is traced."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._context = set_span_in_context(span, Parent())
        self.trace_id = f"{span.get_span_context().trace_id:032x}"

    def encoded(self, seconds: float) -> None:
        """Note that its prompt was rendered and encoded."""
        with _Harmless():
            now = time.time_ns()
            span = self._tracing.tracer.start_span("encode", self._context, start_time=now - int(seconds * 1e9))
            span.end(now)

    def attempt(self, submit: worker_pb2.Submit, choice: Choice) -> AttemptTrace:
        """Note that it is sent to a worker."""
        with _Harmless():
            span = self._tracing.tracer.start_span("attempt", self._context, SpanKind.CLIENT)
            span.set_attributes(_server(choice.worker))
            span.set_attributes(
                {
                    "prefixgate.route.queried_tokens": choice.queried_tokens,
                    "prefixgate.route.reusable_tokens": choice.reusable_tokens,
                    "prefixgate.route.predicted_tokens": choice.cached_tokens,
                }
            )
            submit.traceparent = traceparent_of(span)
            return _TracedAttempt(span)
        return UNTRACED.attempt(submit, choice)

    def end(self, call: Call, code: grpc.StatusCode) -> None:
        """Note its end, with all that is known of it by then."""
        with _Harmless():
            span, record = self._span, call.record
            if record.operation:
                span.update_name(f"{record.operation} {record.model}")
            span.set_attributes(_attributes(call, record, code))
            if code in _SERVERS_FAULTS:
                span.set_status(Status(StatusCode.ERROR))
            span.end()


class _TracedAttempt:
    def __init__(self, span: Span) -> None:
        self._span: Span | None = span

    def end(self, outcome: str) -> None:
        """Note its end. Idempotent."""
        span, self._span = self._span, None
        if span is None:
            return
        with _Harmless():
            if outcome:
                span.set_attribute("error.type", outcome)
                span.set_status(Status(StatusCode.ERROR))
            span.end()


def _server(worker: str) -> Attributes:
    """Write where a worker is."""
    address = parse_address(worker)
    if address.is_unix:
        return {"server.address": address.path}
    return {"server.address": address.host, "server.port": address.port}


def _attributes(call: Call, record: CallRecord, code: grpc.StatusCode) -> Attributes:
    attributes: Attributes = {
        "rpc.response.status_code": code.name,
        "prefixgate.tenant": call.tenant,
        "prefixgate.request_id": call.request_id,
        "prefixgate.attempts": record.attempts,
    }
    if code is not grpc.StatusCode.OK:
        attributes["error.type"] = code.name
    if record.operation:
        attributes |= _generation(call, record)
    usage = record.usage
    if usage is not None:
        attributes |= {
            "prefixgate.usage.block_hit_tokens": usage.block_hit_tokens,
            "prefixgate.usage.partial_copy_tokens": usage.partial_copy_tokens,
            "prefixgate.usage.claimed_tail_tokens": usage.claimed_tail_tokens,
        }
    return attributes


def _generation(call: Call, record: CallRecord) -> Attributes:
    """Write what the conventions for generative AI have names for."""
    attributes: Attributes = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": call.request_id,
        "gen_ai.request.stream": call.method == "Generate",
        "gen_ai.usage.output_tokens": record.completion_tokens,
    }
    if record.prompt_tokens is not None:
        attributes["gen_ai.usage.input_tokens"] = record.prompt_tokens
    if record.usage is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.usage.cached_tokens
    if record.first_token_seconds is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.first_token_seconds
    if record.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = [reason for _, reason in sorted(record.finish_reasons.items())]
    if record.outputs > 1:
        attributes["gen_ai.request.choice.count"] = record.outputs
    if record.sampling is not None:
        attributes |= {
            f"gen_ai.request.{name}": getattr(record.sampling, name)
            for name in _SAMPLING
            if record.sampling.HasField(name)
        }
    return attributes


_SAMPLING: tuple[_Named, ...] = get_args(_Named)


class _Harmless(AbstractContextManager[None, bool]):
    """Keeps a fault of tracing's from the call that is traced."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            logger.error("A call could not be traced any further", exc_info=error)
        return isinstance(error, Exception)
