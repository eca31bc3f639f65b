"""Warm through a gateway, against a worker that does what the test says."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2
from tests.gateway.fake_worker import FakeWorker as Worker
from tests.gateway.fake_worker import describe
from tests.gateway.rig import rig, run, tenants
from tests.gateway.test_token_bucket import Clock

IDS = [1, 2, 3, 4]


def warm(**fields: Any) -> gateway_pb2.WarmRequest:
    return gateway_pb2.WarmRequest(token_ids=gateway_pb2.TokenIds(ids=IDS), **fields)


def test_the_call_is_the_tenants_and_samples_nothing() -> None:
    async def test() -> None:
        async with rig(tenant_settings=tenants(acme="key")) as r:
            cache = generation_pb2.CacheControl(salt="s", ttl_seconds=5.0, retention=9)
            request = warm(cache=cache, priority=3, request_id="mine")
            stream = r.stub.Warm(request, metadata=(("authorization", "Bearer key"),), timeout=50)
            call = await r.next_call()
            submit = call.submit
            assert (submit.tenant, submit.request_id, submit.priority) == ("acme", "mine", 3)
            assert (list(submit.token_ids), submit.n, submit.prefill_only) == (IDS, 1, True)
            assert submit.sampling == generation_pb2.SamplingParams(max_tokens=1)
            assert submit.cache == cache
            assert submit.deadline_seconds > 0
            await call.end(prompt_tokens=4)
            assert [message.WhichOneof("message") async for message in stream] == ["completion"]

    run(test())


def test_progress_comes_as_it_is_made_and_the_completion_last() -> None:
    async def test() -> None:
        async with rig() as r:
            stream = aiter(r.stub.Warm(warm(request_id="mine")))
            call = await r.next_call()
            await call.progress(2, 1)
            first = await anext(stream)
            assert first.progress == gateway_pb2.WarmProgress(prompt_tokens=4, cached_tokens=1, computed_tokens=2)
            await call.progress(3, 1)
            await call.end(prompt_tokens=4, cached_tokens=1, block_hit_tokens=1)
            rest = [message async for message in stream]
            assert rest[-1].completion.usage.cached_tokens == 1
            assert (rest[-1].completion.request_id, rest[-1].completion.model) == ("mine", "fake")
            assert rest[-1].completion.incarnation == "life-1"
            assert await r.metric('prefixgate_gateway_prompt_tokens_total{tenant="local"}') == 4
            cached = 'prefixgate_gateway_cached_tokens_total{source="block_hit",tenant="local"}'
            assert await r.metric(cached) == 1

    run(test())


def test_who_gives_up_has_it_given_up_at_the_worker() -> None:
    async def test() -> None:
        async with rig() as r:
            stream = r.stub.Warm(warm())
            call = await r.next_call()
            stream.cancel()
            async with asyncio.timeout(60):
                assert await call.cancels.get() == worker_pb2.Cancel(call_id=call.submit.call_id)

    run(test())


async def outcome(asked: Any) -> tuple[grpc.StatusCode, str]:
    """Wait for the end of a call of either kind."""
    try:
        if isinstance(asked, grpc.aio.UnaryStreamCall):
            _ = [message async for message in asked]
        else:
            await asked
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def failure(stream: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        _ = [message async for message in stream]
    return failed.value.code(), failed.value.details() or ""


def test_a_worker_that_ends_it_otherwise_or_goes_away_is_told_as_it_is() -> None:
    async def test() -> None:
        async with rig() as r:
            stream = r.stub.Warm(warm())
            await (await r.next_call()).refuse("full", 7.0)
            assert await failure(stream) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
            stream = r.stub.Warm(warm())
            await r.next_call()
            r.session.close()
            assert (await failure(stream))[0] is grpc.StatusCode.UNAVAILABLE

    run(test())


def test_what_cannot_be_warmed_reaches_no_worker() -> None:
    async def test() -> None:
        worker = Worker(describe(max_call_tokens=3))
        async with rig(worker) as r:
            bypass = generation_pb2.CacheControl(mode=generation_pb2.CACHE_MODE_BYPASS)
            for request, field in (
                (gateway_pb2.WarmRequest(), "input"),
                (warm(cache=bypass), "cache.mode"),
                (warm(cache=generation_pb2.CacheControl(ttl_seconds=0.0)), "cache.ttl_seconds"),
                (warm(priority=101), "priority"),
                (warm(), "token_ids"),
            ):
                code, details = await failure(r.stub.Warm(request))
                assert (code, details.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
            code, details = await failure(r.stub.Warm(warm()))
            assert details == "token_ids: comes to 4 tokens; must be at most 3"
            assert r.session.calls.empty()

    run(test())


def test_the_operators_limits_hold_for_what_looks_up_and_what_warms() -> None:
    async def test() -> None:
        ids, text = gateway_pb2.TokenIds(ids=IDS), "x" * 11
        async with rig(max_prompt_tokens=3, max_prompt_bytes=10) as r:
            too_many: list[Any] = [
                r.stub.Warm(warm()),
                r.stub.Explain(gateway_pb2.ExplainRequest(token_ids=ids)),
                r.stub.Pin(gateway_pb2.PinRequest(token_ids=ids, ttl_seconds=1.0)),
            ]
            too_long: list[Any] = [
                r.stub.Warm(gateway_pb2.WarmRequest(prompt=text)),
                r.stub.Explain(gateway_pb2.ExplainRequest(prompt=text)),
                r.stub.Pin(gateway_pb2.PinRequest(prompt=text, ttl_seconds=1.0)),
            ]
            for asked, field, limit in (
                *((asked, "token_ids.ids: 4", "max_prompt_tokens") for asked in too_many),
                *((asked, "prompt: ", "max_prompt_bytes") for asked in too_long),
            ):
                code, details = await outcome(asked)
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert details.startswith(field)
                assert details.endswith(f"(limits.{limit})")
            assert r.session.calls.empty()
            assert r.worker.asked == []

    run(test())


def test_a_warm_is_charged_for_what_was_not_cached() -> None:
    async def test() -> None:
        async with rig(tokens_per_minute=10, quota_clock=Clock()) as r:
            for cached in (3, 0, 3):
                stream = r.stub.Warm(warm())
                await (await r.next_call()).end(prompt_tokens=4, cached_tokens=cached)
                assert await outcome(stream) == (grpc.StatusCode.OK, "")
            # Of 10 tokens 6 are used, and the next may use 4; the one after it finds too few.
            stream = r.stub.Warm(warm())
            await (await r.next_call()).end(prompt_tokens=4, cached_tokens=0)
            assert await outcome(stream) == (grpc.StatusCode.OK, "")
            code, details = await outcome(r.stub.Warm(warm()))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "tokens_per_minute" in details

    run(test())
