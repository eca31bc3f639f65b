import subprocess
import sys

from prefixgate.gateway.client.attempts import RetryPolicy
from prefixgate.gateway.client.terms import Terms
from tests.tracing import Recorded, span_id, trace_id


def test_a_call_names_the_current_span_of_its_application() -> None:
    terms, recorded = Terms("key", None, RetryPolicy()), Recorded()
    assert [name for name, _ in terms.metadata] == ["authorization"]
    with recorded.tracing.tracer.start_as_current_span("application"):
        metadata = dict(terms.metadata)
    (span,) = recorded.all()
    assert metadata.keys() == {"authorization", "traceparent"}
    assert metadata["traceparent"].split("-")[1:3] == [trace_id(span), span_id(span)]
    assert "traceparent" not in dict(terms.metadata)


def test_where_the_application_does_not_trace_nothing_is_loaded() -> None:
    program = (
        "import sys; from prefixgate.gateway.client.trace_context import trace_metadata; "
        "print(trace_metadata(), [name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "() []\n"
