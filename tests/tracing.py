"""A tracer whose spans stay in memory, and what tests read of them."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

from prefixgate.proto.tracing import Tracing

CLIENT_TRACE = "ab" * 16
CLIENT_SPAN = "cd" * 8


def traceparent(*, sampled: bool = True) -> str:
    """Make the header of a client that traces."""
    return f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-{'01' if sampled else '00'}"


class Recorded:
    """The spans of one process that have ended."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing("test", "here", sampler, SimpleSpanProcessor(self._exporter))

    def spans(self) -> dict[str, ReadableSpan]:
        """List them by name, in the order in which they ended. No two may have one name."""
        spans = self._exporter.get_finished_spans()
        found = {span.name: span for span in spans}
        assert len(found) == len(spans), [span.name for span in spans]
        return found

    def all(self) -> tuple[ReadableSpan, ...]:
        """List them in the order in which they ended."""
        return self._exporter.get_finished_spans()


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    """What a span says of its call."""
    assert span.attributes is not None
    return span.attributes


def trace_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def span_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def parent_id(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def times(span: ReadableSpan) -> tuple[int, int]:
    """When it began and ended, in nanoseconds."""
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time
