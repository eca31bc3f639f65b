"""Spans as both processes make them: their tracer, their way to a collector, and how their parents are named.

The only module of both processes, beside `call_spans` of each, that imports OpenTelemetry, which is not in the base
install; none of these is imported unless calls are traced. No global of OpenTelemetry's is set.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from prefixgate.config.version import VERSION

_EXPORT_SECONDS = 5.0
"""For one batch, tries after failures included."""
_MAX_ATTRIBUTE_CHARACTERS = 256
_SPARING_SECONDS = 60.0
_PROPAGATOR = TraceContextTextMapPropagator()


def otlp(endpoint: str) -> SpanProcessor:
    """Make the way to a collector: spans wait in a queue of 2,048, and beyond that they are dropped.

    A thread of its own sends them, so that no call waits for the collector. What OpenTelemetry's variables say of
    headers, certificates and compression (``OTEL_EXPORTER_OTLP_*``) holds.
    """
    exporter = logging.getLogger(OTLPSpanExporter.__module__)
    if not any(isinstance(one, Sparing) for one in exporter.filters):
        exporter.addFilter(Sparing())
    return BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_EXPORT_SECONDS))


class Sparing(logging.Filter):
    """Lets one record a minute through. A collector that is away is worth a line, but not three for each batch."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide about one record."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + _SPARING_SECONDS
        return True


class Tracing:
    """The tracer of one process."""

    def __init__(self, service: str, instance: str, sampler: Sampler, processor: SpanProcessor) -> None:
        """``instance`` tells this life of this process from all others."""
        resource = Resource.create(
            {"service.name": service, "service.version": VERSION, "service.instance.id": instance}
        )
        limits = SpanLimits(max_attribute_length=_MAX_ATTRIBUTE_CHARACTERS)
        self._provider = TracerProvider(
            sampler, resource, shutdown_on_exit=False, active_span_processor=None, span_limits=limits
        )
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("prefixgate", VERSION)

    def close(self, seconds: float) -> None:
        """Send what is left, and give up after so long. Blocks."""
        # A daemon: a collector that takes the connection and never answers must not keep the process from ending.
        closing = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(seconds)


def context_of(carrier: Mapping[str, str]) -> Context:
    """Read the parent that `traceparent`, and `tracestate` where it is there, name. What cannot be read names none."""
    return _PROPAGATOR.extract(carrier, context=Context())


def traceparent_of(span: Span) -> str:
    """Name a span as a parent for another process."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")
