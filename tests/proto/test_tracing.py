"""What both processes have in common when they trace."""

import logging

from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import INVALID_SPAN, get_current_span

from prefixgate.config.version import VERSION
from prefixgate.proto.tracing import Sparing, context_of, otlp, traceparent_of
from tests.tracing import CLIENT_SPAN, CLIENT_TRACE, Recorded, traceparent


def test_a_parent_crosses_between_processes() -> None:
    recorded = Recorded()
    span = recorded.tracing.tracer.start_span("parent")
    named = traceparent_of(span)
    # The bound of the field that it travels in.
    assert len(named) == 55
    assert get_current_span(context_of({"traceparent": named})).get_span_context().span_id == (
        span.get_span_context().span_id
    )


def test_what_names_no_parent_is_none() -> None:
    assert traceparent_of(INVALID_SPAN) == ""
    for value in ("", "x", traceparent()[:-1], traceparent().replace("00-", "ff-", 1)):
        assert not get_current_span(context_of({"traceparent": value})).get_span_context().is_valid
    context = get_current_span(context_of({"traceparent": traceparent(sampled=False)})).get_span_context()
    assert (f"{context.trace_id:032x}", f"{context.span_id:016x}") == (CLIENT_TRACE, CLIENT_SPAN)
    assert not context.trace_flags.sampled


def test_spans_name_their_process() -> None:
    recorded = Recorded()
    recorded.tracing.tracer.start_span("one").end()
    (span,) = recorded.all()
    named = {key: span.resource.attributes[key] for key in ("service.name", "service.instance.id", "service.version")}
    assert named == {"service.name": "test", "service.instance.id": "here", "service.version": VERSION}


def test_a_long_value_is_cut() -> None:
    recorded = Recorded()
    recorded.tracing.tracer.start_span("one", attributes={"key": "x" * 10_000}).end()
    (span,) = recorded.all()
    assert span.attributes == {"key": "x" * 256}


def test_what_is_not_sampled_is_not_sent() -> None:
    recorded = Recorded(ALWAYS_OFF)
    recorded.tracing.tracer.start_span("one").end()
    assert recorded.all() == ()


def test_a_collector_that_is_away_is_worth_a_line_a_minute() -> None:
    now = 5.0
    sparing = Sparing(clock=lambda: now)
    record = logging.LogRecord("x", logging.WARNING, "", 0, "away", None, None)
    passed = []
    for second in range(125):
        now = 5.0 + second
        if sparing.filter(record):
            passed.append(second)
    assert passed == [0, 60, 120]


def test_the_exporter_is_spared_once_however_often_it_is_made() -> None:
    processors = [otlp("http://127.0.0.1:1/v1/traces") for _ in range(2)]
    for processor in processors:
        processor.shutdown()
    logger = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    assert sum(isinstance(one, Sparing) for one in logger.filters) == 1
