"""How calls end when something goes wrong: the client leaves, the worker fails, the gateway itself does."""

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from prefixgate.config.limit_settings import NO_LIMITS
from prefixgate.gateway.call_boundary import CallBoundary
from prefixgate.gateway.errors import CallError
from prefixgate.gateway.live_calls import LiveCalls
from prefixgate.gateway.metrics import CALLS_ENDED, METRICS, GatewayMetrics
from prefixgate.gateway.quota import Quotas
from prefixgate.proto import gateway_pb2_grpc, worker_pb2
from prefixgate.proto.transport import CHANNEL_OPTIONS
from tests.counts import scaled
from tests.gateway.fake_worker import LENGTH, FakeCall, answer_all
from tests.gateway.rig import Rig, collect, prompt, rig, run

DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED
UNLIMITED = Quotas(NO_LIMITS, {"acme": NO_LIMITS}, default_max_tokens=1)


async def status_of(pending: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pending
    return caught.value.code(), caught.value.details() or ""


async def ended(r: Rig, code: str, method: str = "Generate") -> float:
    return await r.metric(f'prefixgate_gateway_calls_ended_total{{code="{code}",method="{method}",tenant="local"}}')


async def until_ended(r: Rig, code: str, count: int, method: str = "Generate") -> None:
    while await ended(r, code, method) < count:
        pass


def test_a_client_that_cancels_ends_its_call_at_the_worker() -> None:
    async def test() -> None:
        async with rig() as r:
            stream = r.stub.Generate(prompt("hi"))
            call = await r.next_call()
            await call.send((0, [1]))
            await stream.read()
            stream.cancel()
            assert await call.cancels.get() == worker_pb2.Cancel(call_id=call.submit.call_id)
            # What was on its way, and the worker's answer to the cancel, go nowhere.
            await call.send((0, [1]))
            await call.end(grpc.StatusCode.CANCELLED)
            await until_ended(r, "CANCELLED", 1)
            assert await r.metric("prefixgate_gateway_live_calls") == 0

    run(test())


def test_a_client_whose_connection_breaks_ends_its_call_at_the_worker() -> None:
    async def test() -> None:
        async with rig() as r:
            async with grpc.aio.insecure_channel(str(r.server.address), options=CHANNEL_OPTIONS) as channel:
                stub: Any = gateway_pb2_grpc.GatewayStub(channel)
                stream = stub.Generate(prompt("hi"))
                call = await r.next_call()
                await call.send((0, [1]))
                await stream.read()
            assert (await call.cancels.get()).call_id == call.submit.call_id
            await until_ended(r, "CANCELLED", 1)

    run(test())


def test_a_clients_deadline_ends_its_call_at_the_worker() -> None:
    async def test() -> None:
        async with rig() as r:
            for seconds in (0.2, 2, 10):
                assert (await status_of(r.stub.Complete(prompt("hi"), timeout=seconds)))[0] is DEADLINE_EXCEEDED
                # A busy machine may let a short deadline pass before the call gets to the worker.
                if not r.session.calls.empty():
                    break
            call = await r.next_call()
            assert (await call.cancels.get()).call_id == call.submit.call_id

    run(test())


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
        (grpc.StatusCode.INTERNAL, grpc.StatusCode.INTERNAL),
        # Not the client's wish, so not the client's status.
        (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_the_workers_status_becomes_the_calls(code: grpc.StatusCode, expected: grpc.StatusCode) -> None:
    async def test() -> None:
        async with rig() as r:
            for start in (r.stub.Complete, lambda request: collect(r.stub.Generate(request))):
                pending: Any = start(prompt("hi"))
                call = await r.next_call()
                await call.send((0, [1]))
                await call.end(code, "the worker's words")
                assert await status_of(pending) == (expected, "the worker's words")
                assert call.cancels.empty()

    run(test())


def test_an_end_without_an_end_of_every_output_is_no_good_end() -> None:
    async def test() -> None:
        async with rig() as r:
            pending = r.stub.Complete(prompt("hi", n=2))
            call = await r.next_call()
            await call.send((0, [1], LENGTH))
            await call.end()
            assert (await status_of(pending))[0] is grpc.StatusCode.INTERNAL

    run(test())


def test_news_of_an_output_that_was_not_asked_for_ends_that_call_alone() -> None:
    async def test() -> None:
        async with rig() as r:
            pending, other = r.stub.Complete(prompt("a")), r.stub.Complete(prompt("b"))
            first, second = await r.next_call(), await r.next_call()
            await first.send((1, [1]))
            await second.finish([66])
            results = [await asyncio.gather(call, return_exceptions=True) for call in (pending, other)]
            assert sorted(type(result[0]).__name__ for result in results) == ["AioRpcError", "CompleteResponse"]
            assert await first.cancels.get() == worker_pb2.Cancel(call_id=first.submit.call_id)

    run(test())


def test_a_fault_of_ours_is_internal_logged_and_says_nothing_of_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    async def test() -> None:
        async with rig() as r:
            monkeypatch.setattr("prefixgate.gateway.attempt.OutputText.push", broken)
            pending = r.stub.Complete(prompt("hi", request_id="mine"))
            call = await r.next_call()
            await call.send((0, [66]))
            code, message = await status_of(pending)
            assert code is grpc.StatusCode.INTERNAL
            assert "mine" in message
            assert "secret" not in message
            assert (await call.cancels.get()).call_id == call.submit.call_id
            monkeypatch.undo()
            pending = r.stub.Complete(prompt("hi"))
            await (await r.next_call()).finish([66])
            await pending

    with caplog.at_level(logging.ERROR):
        run(test())
    assert "secret" in caplog.text


def test_an_inner_cancellation_becomes_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC sends nothing for a handler that ends in CancelledError by itself: the client would wait for ever."""

    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    async def test() -> None:
        async with rig() as r:
            monkeypatch.setattr("prefixgate.gateway.prompt_encoder.PromptEncoder.encode", cancelled)
            assert (await status_of(r.stub.Complete(prompt("hi"))))[0] is grpc.StatusCode.UNAVAILABLE
            assert (await status_of(collect(r.stub.Generate(prompt("hi")))))[0] is grpc.StatusCode.UNAVAILABLE

    run(test())


def test_a_clients_own_cancel_is_passed_on_to_grpc() -> None:
    """A handler that swallows it returns normally, and gRPC then keeps memory of each such stream."""

    async def test() -> None:
        live = LiveCalls()
        gauges = {metric: (dict if metric.labels else float) for metric in METRICS if metric.kind == "gauge"}
        boundary = CallBoundary(live, GatewayMetrics(["acme"], gauges), lambda: "acme", UNLIMITED)
        entered = asyncio.Event()

        async def handler() -> None:
            no_context: Any = None  # a status that somebody tried to send would fail on it
            async with boundary.call("Generate", no_context):
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(handler())
        await entered.wait()
        assert live.num_live == 1
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert live.num_live == 0

    run(test())


def test_a_client_that_is_gone_before_it_could_be_answered_is_no_fault_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """gRPC tells a handler a moment after nothing can be sent any more, and until then its calls fail."""

    class Gone:
        async def write(self, _: object) -> None:
            raise grpc.aio.InternalError("nothing can be sent")

        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("nothing can be sent")

    async def test() -> None:
        gauges = {metric: (dict if metric.labels else float) for metric in METRICS if metric.kind == "gauge"}
        metrics = GatewayMetrics(["acme"], gauges)
        boundary = CallBoundary(LiveCalls(), metrics, lambda: "acme", UNLIMITED)
        context: Any = Gone()

        async def handler(error: Exception | None) -> None:
            async with boundary.call("Generate", context):
                if error is not None:
                    raise error
                await context.write(b"")

        for error in (None, CallError(DEADLINE_EXCEEDED, "too late")):
            with pytest.raises(asyncio.CancelledError):
                await handler(error)
        ended = next(family for family in metrics.families() if family.name == CALLS_ENDED.name)
        assert ended.samples == {("Generate", "acme", "CANCELLED"): 2}

    with caplog.at_level(logging.ERROR):
        run(test())
    assert caplog.text == ""


def test_cancels_at_random_leave_nothing_behind() -> None:
    """Half of the calls are cancelled, at whatever point that hits them: all end, and no other is hurt."""
    rounds, width = scaled(400), 20

    async def script(call: FakeCall) -> None:
        for _ in range(3):
            await call.send((0, [66]))
        await call.finish([66])

    async def one(r: Rig, index: int) -> str:
        pending = r.stub.Complete(prompt("hi"))
        if index % 2:
            for _ in range(index):
                await asyncio.sleep(0)
            pending.cancel()
        try:
            return (await pending).outputs[0].text
        except asyncio.CancelledError:
            return "cancelled"

    async def test() -> None:
        async with rig() as r:
            r.worker.sessions.put_nowait(r.session)
            answering = asyncio.create_task(answer_all(r.worker, script))
            for _ in range(rounds):
                texts = await asyncio.gather(*(one(r, index) for index in range(width)))
                assert texts[::2] == ["cccc"] * (width // 2)
            while await r.metric("prefixgate_gateway_live_calls"):
                pass
            total = await ended(r, "OK", "Complete") + await ended(r, "CANCELLED", "Complete")
            started = 'prefixgate_gateway_calls_started_total{method="Complete",tenant="local"}'
            assert total == await r.metric(started)
            answering.cancel()

    run(test())


def test_cancelled_streams_leave_no_memory_behind() -> None:
    """A kilobyte for each would be less than the objects of one call."""
    process, streams = psutil.Process(), scaled(20_000)

    async def cancel_streams(r: Rig, count: int) -> None:
        for _ in range(count):
            stream = r.stub.Generate(prompt("hi"))
            call = await r.next_call()
            await call.send((0, [64]))
            await stream.read()
            stream.cancel()
            await call.cancels.get()

    async def test() -> None:
        async with rig() as r:
            await cancel_streams(r, 300)
            before = process.memory_info().rss
            await cancel_streams(r, streams)
            grown = process.memory_info().rss - before
            assert grown / streams < 1024, f"{grown} bytes after {streams} streams"

    run(test(), patience=60 + streams * 0.05)
