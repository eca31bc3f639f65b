"""Cache control over a real socket: what a gateway asks of a worker, and what the worker checks again."""

import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode

from prefixgate.proto import gateway_pb2, worker_pb2
from prefixgate.proto.status_details import Details, unpack
from prefixgate.proto.transport import STATUS_DETAILS_KEY
from prefixgate.worker.engine_thread import ENGINE_FAILED, EngineThread
from prefixgate.worker.executor import FAULT
from prefixgate.worker.inbox import MAX_QUESTIONS
from prefixgate.worker.request import End
from tests.worker.driver import Driver, words
from tests.worker.hosting import HANG_SECONDS, INCARNATION, Host, on_host

OK: int = StatusCode.OK.value[0]


def cached(token_ids: list[int], tenant: str = "acme", salt: str = "") -> worker_pb2.CachedPrompt:
    return worker_pb2.CachedPrompt(tenant=tenant, salt=salt, token_ids=token_ids)


def pin(token_ids: list[int], seconds: float = 60.0, tenant: str = "acme") -> worker_pb2.PinCommand:
    return worker_pb2.PinCommand(prompt=cached(token_ids, tenant), ttl_seconds=seconds)


async def said(asked: Any) -> Details:
    """Read what the status of a call says to programs."""
    return unpack(dict(await asked.trailing_metadata())[STATUS_DETAILS_KEY])


async def failure(asked: Any) -> tuple[StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await asked
    return failed.value.code(), failed.value.details() or ""


def test_a_gateway_asks_and_is_answered() -> None:
    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        await gateway.until(await gateway.submit(1, words(40)), ends=1)
        found = await host.stub.Explain(cached(words(40)))
        assert (found.prompt_tokens, found.cached_tokens, found.block_hit_tokens) == (40, 39, 32)
        assert (found.miss_reason, found.incarnation) == (gateway_pb2.MISS_REASON_NONE, INCARNATION)
        answer = await host.stub.Pin(pin(words(40)))
        assert (answer.prompt_tokens, answer.pin.pinned_tokens, answer.pin.incarnation) == (40, 32, INCARNATION)
        assert len(answer.pin.pin_id) == 16
        assert list((await host.stub.ListPins(worker_pb2.ListPinsCommand(tenant="acme"))).pins) == [answer.pin]
        await host.stub.Unpin(worker_pb2.UnpinCommand(tenant="acme", pin_id=answer.pin.pin_id))
        await host.stub.Pin(pin(words(40)))
        done = await host.stub.Flush(worker_pb2.FlushCommand(tenant="acme"))
        assert (done.freed_blocks, done.ended_pins) == (3, 1)
        assert (await host.stub.Explain(cached(words(40)))).miss_reason == gateway_pb2.MISS_REASON_NEVER_SEEN

    on_host(scenario, Driver(pin_limit=8))


def test_a_warm_tells_how_far_it_is_and_no_output() -> None:
    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        warm = await gateway.submit(1, words(100), 1, prefill_only=True)
        await gateway.until(warm, ends=1)
        events = [event for message in gateway.messages for event in message.events]
        told = [event.prefill.computed_tokens for event in events if event.HasField("prefill")]
        assert told == sorted(told)
        assert told[-1] == 100
        assert (warm.outputs, warm.finished, warm.codes) == ({}, {}, [OK])
        assert warm.ends[0].usage.completion_tokens == 0

    on_host(scenario, Driver(max_batch_tokens=32))


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("Explain", cached([], "acme"), "token_ids"),
        ("Explain", cached([10_000]), "token_ids"),
        ("Explain", cached([1] * 2048), "token_ids"),
        ("Explain", cached([1], ""), "tenant"),
        ("Explain", cached([1], "t" * 129), "tenant"),
        ("Explain", cached([1], salt="s" * 129), "salt"),
        ("Pin", worker_pb2.PinCommand(ttl_seconds=1.0), "prompt"),
        ("Pin", pin([1], 0.0), "ttl_seconds"),
        ("Pin", pin([1], 86_401.0), "ttl_seconds"),
        ("Pin", pin([1], float("nan")), "ttl_seconds"),
        ("Pin", pin([1], tenant=""), "prompt.tenant"),
        ("Unpin", worker_pb2.UnpinCommand(tenant="acme"), "pin_id"),
        ("Unpin", worker_pb2.UnpinCommand(pin_id="0"), "tenant"),
        ("ListPins", worker_pb2.ListPinsCommand(), "tenant"),
        ("Flush", worker_pb2.FlushCommand(), "tenant"),
        ("Flush", worker_pb2.FlushCommand(tenant="acme", salt="s" * 129), "salt"),
        ("Report", worker_pb2.ReportRequest(tenant="t" * 129), "tenant"),
    ],
)
def test_what_breaks_a_rule_is_refused_at_this_door_too(method: str, request_: Any, field: str) -> None:
    async def scenario(host: Host) -> None:
        asked = getattr(host.stub, method)(request_)
        code, details = await failure(asked)
        assert (code, details.partition(":")[0]) == (StatusCode.INVALID_ARGUMENT, field)
        assert (await said(asked)).violations == ((field, details),)

    on_host(scenario)


def test_of_too_many_questions_one_hears_when_to_come_again() -> None:
    async def scenario(host: Host) -> None:
        asking = [asyncio.ensure_future(host.stub.Explain(cached([1]))) for _ in range(MAX_QUESTIONS + 1)]
        # Nobody answers, so it is the one of them that ends.
        done, waiting = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED, timeout=HANG_SECONDS)
        (refused,) = done
        error = refused.exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is StatusCode.RESOURCE_EXHAUSTED
        assert unpack(dict(error.trailing_metadata())[STATUS_DETAILS_KEY]).retry_seconds == 1.0
        for one in waiting:
            one.cancel()

    on_host(scenario, threaded=False)


@pytest.mark.parametrize(
    "pin_id", ["0", "x" * 16, "F" * 16, " 000000000000007", "+000000000000007", "0_00000000000007"]
)
def test_only_the_name_that_was_given_is_a_pins(pin_id: str) -> None:
    async def scenario(host: Host) -> None:
        answer = await failure(host.stub.Unpin(worker_pb2.UnpinCommand(tenant="acme", pin_id=pin_id)))
        assert answer == (StatusCode.NOT_FOUND, "pin_id: there is no such pin")

    on_host(scenario)


def test_a_fault_in_the_work_is_told_without_its_text() -> None:
    driver = Driver()

    def broken(*_: object) -> None:
        raise RuntimeError("secret of another tenant")

    driver.cache.explain = broken  # type: ignore[method-assign, assignment]

    async def scenario(host: Host) -> None:
        code, details = await failure(host.stub.Explain(cached([1])))
        assert (code, details) == (StatusCode.INTERNAL, "the call failed in the worker")
        gateway = await host.gateway()
        good = await gateway.submit(1, words(20), 5)
        await gateway.until(good, ends=1)
        assert good.codes == [OK]

    on_host(scenario, driver)


def test_while_the_model_loads_nothing_is_answered() -> None:
    async def scenario(host: Host) -> None:
        code, _ = await failure(host.stub.Explain(cached([1])))
        assert code is StatusCode.UNAVAILABLE

    on_host(scenario, serve=False)


def test_who_gives_up_takes_the_question_back() -> None:
    async def scenario(host: Host) -> None:
        # The engine does not step, as in a step that takes for ever.
        asked = host.stub.Flush(worker_pb2.FlushCommand(tenant="acme"))
        await asyncio.to_thread(host.driver.engine.inbox.wait, HANG_SECONDS)
        question = host.driver.engine.inbox.take_question()
        assert question is not None
        taken_back, loop = asyncio.Event(), asyncio.get_running_loop()
        question.answer.add_done_callback(lambda _: loop.call_soon_threadsafe(taken_back.set))
        asked.cancel()
        async with asyncio.timeout(HANG_SECONDS):
            await taken_back.wait()
        assert question.answer.cancelled()

    on_host(scenario, threaded=False)


def test_an_engine_that_ends_refuses_who_waits() -> None:
    async def scenario(host: Host) -> None:
        asked = asyncio.ensure_future(failure(host.stub.Explain(cached([1]))))
        await asyncio.to_thread(host.driver.engine.inbox.wait, HANG_SECONDS)
        host.driver.engine.inbox.close()
        host.driver.engine.questions.refuse_all(End(StatusCode.UNAVAILABLE, "the worker is shutting down"))
        async with asyncio.timeout(HANG_SECONDS):
            assert await asked == (StatusCode.UNAVAILABLE, "the worker is shutting down")

    on_host(scenario, threaded=False)


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("the books do not balance")


@pytest.mark.parametrize(
    ("method", "request_", "part"),
    [
        ("Pin", pin(words(40)), "pin"),
        ("Unpin", worker_pb2.UnpinCommand(tenant="acme", pin_id="0000000000000001"), "unpin"),
        ("Flush", worker_pb2.FlushCommand(tenant="acme"), "flush"),
    ],
)
def test_a_cache_that_fails_while_it_is_changed_ends_the_engine(method: str, request_: Any, part: str) -> None:
    driver = Driver()
    setattr(driver.cache, part, broken)

    async def scenario(host: Host) -> None:
        asked = getattr(host.stub, method)(request_)
        while not driver.engine.inbox.wait(timeout=0):  # noqa: ASYNC110  # the inbox tells no event
            await asyncio.sleep(0)
        gateway = await host.gateway()
        call = await gateway.submit(1, words(40))
        while not driver.engine.inbox.num_submits:  # noqa: ASYNC110
            await asyncio.sleep(0)
        # Not earlier, so that the first step finds both.
        thread = EngineThread(driver.engine, lambda: None)
        thread.start()
        assert await failure(asked) == (FAULT.code, FAULT.message)
        await gateway.until(call, ends=1)
        assert (call.codes, call.ends[0].message) == ([ENGINE_FAILED.code.value[0]], ENGINE_FAILED.message)
        assert await asyncio.to_thread(thread.join, HANG_SECONDS)
        late = host.stub.Flush(worker_pb2.FlushCommand(tenant="acme"))
        assert (await failure(late))[0] is StatusCode.UNAVAILABLE

    on_host(scenario, driver, threaded=False)


def test_a_cache_that_fails_while_it_is_read_fails_for_who_asked() -> None:
    driver = Driver()
    driver.cache.explain = broken  # type: ignore[method-assign, assignment]

    async def scenario(host: Host) -> None:
        assert await failure(host.stub.Explain(cached(words(40)))) == (FAULT.code, FAULT.message)
        gateway = await host.gateway()
        await gateway.until(call := await gateway.submit(1, words(40)), ends=1)
        assert call.codes == [OK]

    on_host(scenario, driver)
