"""Real processes that trace: what reaches a collector, and what a collector that is not there does to calls."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from prefixgate.gateway.client import Client
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, generation_pb2
from tests.served import Served
from tests.tracing import CLIENT_SPAN, CLIENT_TRACE, Recorded, traceparent

SPANS_OF_A_CALL = 8
HANG_SECONDS = 60.0
WITNESS = ("--model", "witness", "--blocks", "128")
SYSTEM = "You are the system prompt of a test, and long enough to fill some blocks of the pool."


class Collector:
    """Takes spans over HTTP as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        """Each with the name of the service that it came from."""
        self._came = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (service,) = (a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            with self._came:
                self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
                self._came.notify_all()

    def wait_for(self, count: int) -> None:
        """Wait until so many spans have come."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.spans) >= count, HANG_SECONDS), self.spans


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    # What waits when a process ends has a bounded time to be sent, which a busy machine could exceed.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with Collector() as collector:
        yield collector


def ask(served: Served, question: str, *metadata: tuple[str, str]) -> gateway_pb2.CompleteResponse:
    chat = gateway_pb2.Chat(
        messages=[
            gateway_pb2.ChatMessage(role="system", content=SYSTEM),
            gateway_pb2.ChatMessage(role="user", content=question),
        ]
    )
    request = gateway_pb2.GenerateRequest(
        chat=chat, request_id=question, sampling=generation_pb2.SamplingParams(max_tokens=3)
    )
    with grpc.insecure_channel(served.address) as channel:
        return gateway_pb2_grpc.GatewayStub(channel).Complete(request, metadata=metadata, timeout=60)


def lines(served: Served) -> list[dict[str, Any]]:
    """What both processes logged; every line is an object."""
    return [json.loads(line) for line in served.log.read_text().splitlines()]


def value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    return [item.string_value for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def attributes(span: Span) -> dict[str, Any]:
    return {attribute.key: value(attribute.value) for attribute in span.attributes}


def test_a_call_is_one_trace_through_both_processes(tmp_path: Path, collector: Collector) -> None:
    tracing = ("--tracing-endpoint", collector.endpoint, "--tracing-sample-ratio", "1", "--log-format", "json")
    with Served(tmp_path, *WITNESS, *tracing) as served:
        served.wait_until_ready()
        for question in ("cold", "warm"):
            answer = ask(served, question, ("traceparent", traceparent()))
        collector.wait_for(2 * SPANS_OF_A_CALL)
        assert served.stop() == 0

    usage = answer.completion.usage
    assert usage.cached_tokens > 16
    roots = {attributes(span)["prefixgate.request_id"]: span for _, span in collector.spans if not span.parent_span_id}
    assert set(roots) == {"cold", "warm"}
    root = roots["warm"]
    of_trace = {span.name: (service, span) for service, span in collector.spans if span.trace_id == root.trace_id}
    assert {name: service.removeprefix("prefixgate-") for name, (service, _) in of_trace.items()} == {
        "chat witness": "gateway",
        "encode": "gateway",
        "attempt": "gateway",
        "generate": "worker",
        "queue": "worker",
        "match": "worker",
        "prefill": "worker",
        "decode": "worker",
    }
    spans = {name: span for name, (_, span) in of_trace.items()}
    assert spans["generate"].parent_span_id == spans["attempt"].span_id
    assert spans["attempt"].parent_span_id == root.span_id
    phases = [spans[name] for name in ("queue", "match", "prefill", "decode")]
    assert {phase.parent_span_id for phase in phases} == {spans["generate"].span_id}
    found = attributes(root)
    assert found["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert found["gen_ai.usage.cache_read.input_tokens"] == usage.cached_tokens
    assert found["gen_ai.usage.output_tokens"] == 3
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    # The client's trace is linked, not taken over.
    (link,) = root.links
    assert (link.trace_id.hex(), link.span_id.hex()) == (CLIENT_TRACE, CLIENT_SPAN)
    assert SYSTEM not in str(collector.spans)

    calls = {line["request_id"]: line for line in lines(served) if line["message"] == "Complete OK"}
    assert calls["warm"]["trace_id"] == root.trace_id.hex()
    assert calls["warm"]["block_hit_tokens"] == usage.block_hit_tokens
    assert SYSTEM not in served.log.read_text()


def test_a_client_that_is_trusted_has_its_trace_continued(tmp_path: Path, collector: Collector) -> None:
    tracing = ("--tracing-endpoint", collector.endpoint, "--tracing-sample-ratio", "0", "--tracing-trust-clients")
    with Served(tmp_path, *WITNESS, *tracing) as served:
        served.wait_until_ready()
        ask(served, "not sampled")
        # Ours names the current span by itself.
        application = Recorded().tracing.tracer
        with application.start_as_current_span("application") as span, Client(served.address) as client:
            client.complete("sampled", max_tokens=3)
        collector.wait_for(SPANS_OF_A_CALL)
        assert served.stop() == 0
    assert len(collector.spans) == SPANS_OF_A_CALL
    (root,) = (found for _, found in collector.spans if found.name == "text_completion witness")
    own = span.get_span_context()
    assert {found.trace_id.hex() for _, found in collector.spans} == {f"{own.trace_id:032x}"}
    assert root.parent_span_id.hex() == f"{own.span_id:016x}"


@pytest.mark.parametrize("answers", [True, False], ids=["hangs", "refuses"])
def test_calls_and_the_end_do_not_wait_for_a_collector(tmp_path: Path, answers: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        if not answers:
            silent.close()
        with Served(tmp_path, *WITNESS, "--tracing-endpoint", endpoint, "--tracing-sample-ratio", "1") as served:
            served.wait_until_ready()
            assert [len(ask(served, str(n)).outputs) for n in range(3)] == [1, 1, 1]
            # With exit code 0: neither process had to be killed.
            assert served.stop() == 0


@pytest.mark.parametrize("module", ["prefixgate.gateway.server", "prefixgate.worker.server"])
def test_where_nothing_is_traced_nothing_is_loaded(module: str) -> None:
    program = f"import sys, {module}; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "[]\n"
