"""The phases of a call as spans, from the times that the engine noted."""

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind
from opentelemetry.trace import StatusCode as SpanStatus

from prefixgate.worker.call_spans import SAMPLER, CallSpans
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
from tests.worker.driver import Call, Driver, words

SECOND = 10**9
PHASES = ["queue", "match", "prefill", "decode"]


def trace(driver: Driver, call: Call, parent: str = "") -> dict[str, ReadableSpan]:
    """Trace a call that has ended, below a span of its gateway's, and return its spans."""
    recorded = Recorded(SAMPLER)
    spans = CallSpans(recorded.tracing, clock=lambda: driver.now)
    assert call.end is not None
    call.request.traceparent = parent or traceparent()
    spans.call_ended(call.request, call.end)
    return recorded.spans()


def seconds(span: ReadableSpan) -> float:
    begin, end = times(span)
    return round((end - begin) / SECOND, 3)


class TestPhases:
    def test_a_call_has_a_span_with_its_phases_below_it_one_after_the_other(self) -> None:
        driver = Driver()
        driver.ask(words(40))
        call = driver.submit(words(37), 3)
        driver.now += 2
        driver.step()  # admitted, and its first token sampled
        driver.now += 5
        driver.run()
        spans = trace(driver, call)
        assert list(spans) == [*PHASES, "generate"]
        root = spans["generate"]
        assert (trace_id(root), parent_id(root), root.kind) == (CLIENT_TRACE, CLIENT_SPAN, SpanKind.SERVER)
        assert {parent_id(spans[name]) for name in PHASES} == {span_id(root)}
        assert [seconds(spans[name]) for name in [*PHASES, "generate"]] == [2, 0, 0, 5, 7]
        marks = [times(spans[name]) for name in PHASES]
        assert [end for _, end in marks[:-1]] == [begin for begin, _ in marks[1:]]
        assert times(root) == (marks[0][0], marks[-1][1])

    def test_the_phases_say_what_came_of_them(self) -> None:
        driver = Driver()
        driver.ask(words(40))
        call = driver.ask(words(37), 3, n=2)
        spans, usage = trace(driver, call), call.usage
        assert usage.cached_tokens > 32
        assert attributes(spans["match"]) == {
            "prefixgate.usage.block_hit_tokens": 32,
            "prefixgate.usage.partial_copy_tokens": usage.partial_copy_tokens,
            "prefixgate.usage.claimed_tail_tokens": usage.claimed_tail_tokens,
            "prefixgate.miss_reason": call.request.miss_reason.value,
        }
        assert attributes(spans["prefill"]) == {"prefixgate.computed_tokens": 37 - usage.cached_tokens}
        assert attributes(spans["decode"]) == {"prefixgate.completion_tokens": 6, "prefixgate.outputs": 2}
        assert attributes(spans["generate"])["rpc.response.status_code"] == "OK"

    def test_a_prompt_that_is_only_computed_has_no_decode(self) -> None:
        driver = Driver()
        assert list(trace(driver, driver.warm(words(20)))) == [*PHASES[:3], "warm"]

    def test_a_call_that_ends_while_it_waits_was_in_the_queue_all_the_time(self) -> None:
        driver = Driver()
        call = driver.submit(words(20), deadline_seconds=1)
        driver.now += 3
        driver.run()
        spans = trace(driver, call)
        assert list(spans) == ["queue", "generate"]
        assert times(spans["queue"]) == times(spans["generate"])
        assert attributes(spans["generate"])["error.type"] == "DEADLINE_EXCEEDED"
        assert spans["generate"].status.status_code is SpanStatus.ERROR

    def test_a_call_that_is_preempted_stays_in_its_phase(self) -> None:
        driver = Driver(6)
        calls = [driver.submit(words(30, seed), 40) for seed in (0, 1)]
        driver.run()
        preempted = next(call for call in calls if call.request.preemptions)
        spans = trace(driver, preempted)
        assert list(spans) == [*PHASES, "generate"]
        assert attributes(spans["generate"])["prefixgate.preemptions"] == preempted.request.preemptions


class TestWhatIsTraced:
    @pytest.mark.parametrize("parent", [traceparent(sampled=False), "no parent", "\x00" * 55])
    def test_a_worker_begins_no_trace_of_its_own(self, parent: str) -> None:
        driver = Driver()
        assert trace(driver, driver.ask(words(20)), parent) == {}

    def test_a_call_that_is_not_traced_costs_nothing(self) -> None:
        driver, recorded = Driver(), Recorded()
        call = driver.ask(words(20))
        assert call.end is not None
        CallSpans(recorded.tracing).call_ended(call.request, call.end)
        assert recorded.all() == ()

    def test_what_fails_in_tracing_hurts_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def start_span(*args: Any, **options: Any) -> None:
            raise RuntimeError("cannot")

        driver, recorded = Driver(), Recorded(SAMPLER)
        call = driver.ask(words(20))
        assert call.end is not None
        call.request.traceparent = traceparent()
        monkeypatch.setattr(recorded.tracing.tracer, "start_span", start_span)
        CallSpans(recorded.tracing).call_ended(call.request, call.end)
