"""What a traced call tells, who decides what is traced, and that nobody's call is hurt by it."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes
from opentelemetry.trace import SpanKind
from opentelemetry.trace import StatusCode as SpanStatus

from prefixgate.config.address import Address
from prefixgate.gateway.call_spans import CallSpans, sampler_of
from prefixgate.gateway.candidate import Choice
from prefixgate.gateway.live_calls import Call
from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2
from prefixgate.proto.tracing import Tracing
from tests.gateway.fake_worker import STOP, FakeWorker
from tests.gateway.fleeted import fleeted
from tests.gateway.rig import Rig, chat, collect, prompt, rig, run
from tests.tracing import (
    CLIENT_SPAN,
    CLIENT_TRACE,
    Recorded,
    attributes,
    parent_id,
    span_id,
    times,
    trace_id,
    traceparent,
)

SECRET = "what nobody may read"
UNREADABLE = ("", "00", f"00-{'0' * 32}-{'0' * 16}-01", "ff-x", "\x00" * 50, "0" * 5000)


def traced(recorded: Recorded, **options: Any) -> CallSpans:
    return CallSpans(recorded.tracing, **{"trust_clients": False, **options})


async def one_call(rig: Rig, *metadata: tuple[str, str], request: gateway_pb2.GenerateRequest | None = None) -> str:
    """Have a call answered, and return what the worker got as its parent."""
    stream = rig.stub.Generate(request or prompt("hello"), metadata=metadata)
    call = await rig.next_call()
    await call.finish([65, 66], cached_tokens=3, block_hit_tokens=2, partial_copy_tokens=1)
    await collect(stream)
    return call.submit.traceparent


class TestSpans:
    def test_a_call_has_a_span_with_the_encoding_and_the_attempt_below_it(self) -> None:
        recorded = Recorded()

        async def test() -> str:
            async with rig(traces=traced(recorded)) as it:
                return await one_call(it)

        parent = run(test())
        spans = recorded.spans()
        assert list(spans) == ["encode", "attempt", "text_completion fake"]
        root, attempt = spans["text_completion fake"], spans["attempt"]
        assert {trace_id(span) for span in spans.values()} == {trace_id(root)}
        assert [parent_id(span) for span in spans.values()] == [span_id(root), span_id(root), None]
        assert (root.kind, attempt.kind) == (SpanKind.SERVER, SpanKind.CLIENT)
        assert str(attributes(attempt)["server.address"]).endswith("/worker.sock")
        # The worker's spans go below the attempt.
        assert parent.split("-")[1:3] == [trace_id(root), span_id(attempt)]
        (begin, end), (begin_attempt, end_attempt) = times(root), times(attempt)
        assert begin <= begin_attempt <= end_attempt <= end

    def test_attributes_have_the_names_of_the_conventions(self) -> None:
        recorded = Recorded()
        request = prompt(
            "hello",
            n=2,
            request_id="mine",
            sampling=generation_pb2.SamplingParams(temperature=0.5, top_k=4, seed=7, max_tokens=9),
        )

        async def test() -> None:
            async with rig(traces=traced(recorded)) as it:
                stream = it.stub.Generate(request)
                call = await it.next_call()
                await call.send((0, [65], STOP), (1, [66, 67], STOP))
                await call.end(prompt_tokens=5, cached_tokens=3, block_hit_tokens=3, completion_tokens=3)
                await collect(stream)

        run(test())
        found = dict(attributes(recorded.spans()["text_completion fake"]))
        assert found.pop("gen_ai.response.time_to_first_chunk") > 0
        assert found == {
            rpc_attributes.RPC_METHOD: "prefixgate.v1.Gateway/Generate",
            "rpc.system.name": "grpc",
            "rpc.response.status_code": "OK",
            gen_ai_attributes.GEN_AI_OPERATION_NAME: "text_completion",
            gen_ai_attributes.GEN_AI_PROVIDER_NAME: "prefixgate",
            gen_ai_attributes.GEN_AI_REQUEST_MODEL: "fake",
            gen_ai_attributes.GEN_AI_REQUEST_STREAM: True,
            gen_ai_attributes.GEN_AI_REQUEST_CHOICE_COUNT: 2,
            gen_ai_attributes.GEN_AI_REQUEST_MAX_TOKENS: 9,
            gen_ai_attributes.GEN_AI_REQUEST_TEMPERATURE: 0.5,
            gen_ai_attributes.GEN_AI_REQUEST_TOP_K: 4,
            gen_ai_attributes.GEN_AI_REQUEST_SEED: 7,
            gen_ai_attributes.GEN_AI_RESPONSE_ID: "mine",
            gen_ai_attributes.GEN_AI_RESPONSE_MODEL: "fake",
            gen_ai_attributes.GEN_AI_RESPONSE_FINISH_REASONS: ("stop", "stop"),
            gen_ai_attributes.GEN_AI_USAGE_INPUT_TOKENS: 5,
            gen_ai_attributes.GEN_AI_USAGE_OUTPUT_TOKENS: 3,
            gen_ai_attributes.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 3,
            "prefixgate.tenant": "local",
            "prefixgate.request_id": "mine",
            "prefixgate.attempts": 1,
            "prefixgate.usage.block_hit_tokens": 3,
            "prefixgate.usage.partial_copy_tokens": 0,
            "prefixgate.usage.claimed_tail_tokens": 0,
        }

    def test_a_conversation_is_a_chat_and_other_methods_go_by_their_name(self) -> None:
        recorded = Recorded()

        async def test() -> None:
            async with rig(traces=traced(recorded)) as it:
                await one_call(it, request=chat(("user", "hi")))
                await it.stub.Stats(gateway_pb2.StatsRequest())

        run(test())
        assert [span.name for span in recorded.all()][2:] == ["chat fake", "prefixgate.v1.Gateway/Stats"]

    def test_nothing_that_was_said_and_no_key_is_in_a_span(self) -> None:
        recorded = Recorded()
        request = chat(
            ("system", SECRET), ("user", SECRET), stop=[SECRET], cache=generation_pb2.CacheControl(salt=SECRET)
        )

        async def test() -> None:
            async with rig(traces=traced(recorded)) as it:
                await one_call(it, ("authorization", f"Bearer {SECRET}"), ("baggage", f"a={SECRET}"), request=request)

        run(test())
        written = json.dumps([span.to_json() for span in recorded.all()])
        assert "chat fake" in written
        assert SECRET not in written

    def test_a_call_that_goes_to_a_second_worker_has_two_attempts(self, tmp_path: Path) -> None:
        recorded = Recorded()

        async def test() -> list[str]:
            async with fleeted(tmp_path, FakeWorker(), FakeWorker(), traces=traced(recorded)) as fleet:
                answer = asyncio.ensure_future(fleet.complete())
                _, first = await fleet.next_call()
                await first.end(grpc.StatusCode.UNAVAILABLE, "gone")
                _, second = await fleet.next_call()
                await second.finish([65])
                await answer
                return [call.submit.traceparent.split("-")[2] for call in (first, second)]

        parents = run(test())
        failed, good = [span for span in recorded.all() if span.name == "attempt"]
        assert [span_id(failed), span_id(good)] == parents
        assert attributes(failed)["error.type"] == "UNAVAILABLE"
        assert failed.status.status_code is SpanStatus.ERROR
        assert "error.type" not in attributes(good)
        assert attributes(recorded.all()[-1])["prefixgate.attempts"] == 2

    @pytest.mark.parametrize("host", ["10.0.0.1", "::1", "worker.example"])
    def test_a_worker_over_the_network_has_host_and_port(self, host: str) -> None:
        recorded = Recorded()
        context: Any = SimpleNamespace(invocation_metadata=lambda: ())
        worker = str(Address(host, 8060))
        traced(recorded).begin("Generate", context).attempt(worker_pb2.Submit(), Choice(worker, 5, 4, 3)).end("")
        assert attributes(recorded.spans()["attempt"]) == {
            "server.address": host,
            "server.port": 8060,
            "prefixgate.route.queried_tokens": 5,
            "prefixgate.route.reusable_tokens": 4,
            "prefixgate.route.predicted_tokens": 3,
        }


class TestEnds:
    def test_a_fault_is_an_error_and_a_client_s_own_is_none(self) -> None:
        recorded = Recorded()

        async def test() -> None:
            async with rig(traces=traced(recorded)) as it:
                stream = it.stub.Generate(prompt("hello"))
                await (await it.next_call()).end(grpc.StatusCode.INTERNAL, "broken")
                with pytest.raises(grpc.aio.AioRpcError):
                    await collect(stream)
                with pytest.raises(grpc.aio.AioRpcError):
                    await collect(it.stub.Generate(prompt("")))

        run(test())
        fault, refused = (span for span in recorded.all() if span.kind is SpanKind.SERVER)
        assert attributes(fault)["error.type"] == "INTERNAL"
        assert fault.status.status_code is SpanStatus.ERROR
        assert attributes(refused)["rpc.response.status_code"] == "INVALID_ARGUMENT"
        assert refused.status.status_code is SpanStatus.UNSET

    def test_a_call_that_its_client_gives_up_ends_its_spans(self) -> None:
        recorded = Recorded()

        async def test() -> None:
            async with rig(traces=traced(recorded)) as it:
                stream = it.stub.Generate(prompt("hello"))
                call = await it.next_call()
                await call.send((0, [65]))
                await stream.read()
                stream.cancel()
                await call.cancels.get()

        run(test())
        root = recorded.spans()["text_completion fake"]
        assert attributes(root)["error.type"] == "CANCELLED"
        assert attributes(root)["gen_ai.usage.output_tokens"] == 1
        assert attributes(recorded.spans()["attempt"])["error.type"] == "CANCELLED"

    def test_a_warm_is_traced_too(self) -> None:
        recorded = Recorded()

        async def test() -> None:
            async with rig(traces=traced(recorded)) as it:
                stream = it.stub.Warm(gateway_pb2.WarmRequest(prompt="hello"))
                await (await it.next_call()).end(prompt_tokens=5, cached_tokens=2, block_hit_tokens=2)
                async for _ in stream:
                    pass

        run(test())
        spans = recorded.spans()
        assert list(spans) == ["encode", "attempt", "prefixgate.v1.Gateway/Warm"]
        assert attributes(spans["prefixgate.v1.Gateway/Warm"])["prefixgate.usage.block_hit_tokens"] == 2


class TestSampling:
    def begun(self, sampler_ratio: float, *, trust_clients: bool, sampled: bool) -> list[ReadableSpan]:
        recorded = Recorded(sampler_of(sampler_ratio))

        async def test() -> str:
            async with rig(traces=traced(recorded, trust_clients=trust_clients)) as it:
                return await one_call(it, ("traceparent", traceparent(sampled=sampled)))

        parent = run(test())
        # A worker traces what its gateway does, and nothing else.
        assert bool(parent) is bool(recorded.all())
        return [span for span in recorded.all() if span.kind is SpanKind.SERVER]

    def test_a_client_cannot_have_its_calls_traced(self) -> None:
        assert self.begun(0, trust_clients=False, sampled=True) == []

    def test_a_client_cannot_keep_its_calls_from_being_traced(self) -> None:
        (root,) = self.begun(1, trust_clients=False, sampled=False)
        # A trace of its own, so that nobody chooses the id by which chance decides, linked to the client's.
        assert trace_id(root) != CLIENT_TRACE
        assert root.parent is None
        (link,) = root.links
        assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == (CLIENT_TRACE, CLIENT_SPAN)

    def test_a_trusted_client_decides(self) -> None:
        assert self.begun(1, trust_clients=True, sampled=False) == []
        (root,) = self.begun(0, trust_clients=True, sampled=True)
        assert (trace_id(root), parent_id(root), list(root.links)) == (CLIENT_TRACE, CLIENT_SPAN, [])

    def test_text_of_the_clients_choice_is_kept_only_of_one_who_is_trusted(self) -> None:
        metadata = (("traceparent", traceparent(sampled=True)), ("tracestate", "vendor=" + "x" * 200))
        context: Any = SimpleNamespace(invocation_metadata=lambda: metadata)
        for trust_clients in (True, False):
            recorded = Recorded()
            trace = traced(recorded, trust_clients=trust_clients).begin("Stats", context)
            trace.end(Call("Stats", "acme", "mine", task=None), grpc.StatusCode.OK)
            (span,) = recorded.all()
            (known,) = [span.parent] if span.parent else [link.context for link in span.links]
            assert dict(known.trace_state) == ({"vendor": "x" * 200} if trust_clients else {})

    @pytest.mark.parametrize("value", UNREADABLE)
    def test_what_cannot_be_read_is_no_parent(self, value: str) -> None:
        metadata = (("traceparent", value), ("tracestate", "a=b"))
        context: Any = SimpleNamespace(invocation_metadata=lambda: metadata)
        for trust_clients in (True, False):
            recorded = Recorded()
            trace = traced(recorded, trust_clients=trust_clients).begin("Stats", context)
            trace.end(Call("Stats", "acme", "mine", task=None), grpc.StatusCode.OK)
            (span,) = recorded.all()
            assert (span.parent, list(span.links)) == (None, [])


class Broken(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("no way out")


class TestFaults:
    def test_a_call_is_answered_though_no_span_can_be_sent(self) -> None:
        async def test() -> list[gateway_pb2.GenerateResponse]:
            tracing = Tracing("test", "here", sampler_of(1), SimpleSpanProcessor(Broken()))
            async with rig(traces=CallSpans(tracing, trust_clients=False)) as it:
                stream = it.stub.Generate(prompt("hello"))
                await (await it.next_call()).finish([65])
                return await collect(stream)

        assert run(test())[-1].HasField("completion")

    @pytest.mark.parametrize("broken", [{1}, {2}, {3}, {1, 2, 3}], ids=str)
    def test_a_call_is_answered_though_tracing_itself_fails(
        self, broken: set[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recorded = Recorded()
        start, spans = recorded.tracing.tracer.start_span, iter(range(1, 100))

        def start_span(*args: Any, **options: Any) -> Any:
            if next(spans) in broken:
                raise RuntimeError("cannot")
            return start(*args, **options)

        monkeypatch.setattr(recorded.tracing.tracer, "start_span", start_span)

        async def test() -> None:
            async with rig(traces=traced(recorded)) as it:
                await one_call(it)

        run(test())
        assert next(spans) > 1
