"""Limits as clients see them, and what calls are charged however they end: real gateway, clock in the test's hand."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest, QuotaFailure, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from prefixgate.config.limit_settings import NO_LIMITS
from prefixgate.proto import gateway_pb2, generation_pb2, transport
from tests.counts import scaled
from tests.gateway.fake_worker import LENGTH, FakeCall
from tests.gateway.rig import Rig, chat, collect, gateway_client, prompt, rig, run, tenants
from tests.gateway.test_token_bucket import Clock

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT
CHARGED = 'prefixgate_gateway_charged_tokens_total{tenant="local"}'


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Read what a refusal says to programs."""
    packed = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(packed, bytes)
    status = Status.FromString(packed)
    found: dict[str, Any] = {}
    for detail in status.details:
        for kind in (BadRequest, QuotaFailure, RetryInfo):
            if detail.Is(kind.DESCRIPTOR):
                message = found[kind.__name__] = kind()
                detail.Unpack(message)
    return found


async def refused(pending: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pending
    return caught.value


def sampled(max_tokens: int, **fields: Any) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(max_tokens=max_tokens, **fields)


async def refusals(r: Rig, limit: str, tenant: str = "local") -> float:
    return await r.metric(f'prefixgate_gateway_limit_refusals_total{{limit="{limit}",tenant="{tenant}"}}')


def test_a_refusal_carries_limit_value_bound_and_the_time_to_try_again() -> None:
    async def test() -> None:
        clock = Clock()
        async with rig(requests_per_minute=2, quota_clock=clock) as r:
            for _ in range(2):
                await r.stub.Tokenize(gateway_pb2.TokenizeRequest(prompt="hi"))
            for pending in (
                r.stub.Tokenize(gateway_pb2.TokenizeRequest(prompt="hi")),
                r.stub.Complete(prompt("hi")),
                collect(r.stub.Generate(prompt("hi"))),
                r.stub.Stats(gateway_pb2.StatsRequest()),
            ):
                error = await refused(pending)
                assert error.code() is EXHAUSTED
                assert "limits.requests_per_minute of all tenants: more than 2 calls within a minute" in str(
                    error.details()
                )
                said = details(error)
                assert said["RetryInfo"].retry_delay.ToMilliseconds() == 30_000
                assert said["QuotaFailure"].violations[0].subject == "all tenants"
                assert "more than 2 calls" in said["QuotaFailure"].violations[0].description
            assert await refusals(r, "requests_per_minute") == 4
            clock.now += 30
            await r.stub.Tokenize(gateway_pb2.TokenizeRequest(prompt="hi"))
            assert r.session.calls.empty()

    run(test())


def test_health_is_not_counted_and_not_refused() -> None:
    async def test() -> None:
        async with rig(requests_per_minute=1, max_concurrent_calls=1, quota_clock=Clock()) as r:
            for _ in range(5):
                assert await r.health() == 1

    run(test())


@pytest.mark.parametrize(
    ("limits", "request_", "limit", "field", "words"),
    [
        ({"max_outputs": 2}, prompt("hi", n=3), "max_outputs", "n", "3 is out of range; must be in [1, 2]"),
        (
            {"max_prompt_bytes": 4},
            prompt("hello"),
            "max_prompt_bytes",
            "prompt",
            "is at least 5 bytes long; must be at most 4",
        ),
        (
            {"max_prompt_bytes": 4},
            chat(("user", "hello")),
            "max_prompt_bytes",
            "chat.messages[0].content",
            "is at least 5 bytes long; must be at most 4",
        ),
        (
            {"max_prompt_tokens": 4},
            prompt("hello"),
            "max_prompt_tokens",
            "prompt",
            "comes to 5 tokens; must be at most 4",
        ),
        (
            {"max_prompt_tokens": 4},
            gateway_pb2.GenerateRequest(token_ids=gateway_pb2.TokenIds(ids=range(5))),
            "max_prompt_tokens",
            "token_ids.ids",
            "5 ids; must be at most 4",
        ),
        (
            {"max_output_tokens": 20},
            prompt("hi", n=3, sampling=sampled(7)),
            "max_output_tokens",
            "sampling.max_tokens",
            "3 outputs of 7 tokens are 21; must be at most 20 together",
        ),
        ({"max_output_tokens": 2}, prompt("hi", n=3), "max_output_tokens", "sampling.max_tokens", "are 3; must be"),
        ({"max_stops": 1}, prompt("hi", stop=["a", "b"]), "max_stops", "stop", "2 strings; must be at most 1"),
        (
            {"max_logit_biases": 1},
            prompt("hi", sampling=sampled(1, logit_bias={1: 1.0, 2: 1.0})),
            "max_logit_biases",
            "sampling.logit_bias",
            "2 ids; must be at most 1",
        ),
    ],
)
def test_a_call_over_a_bound_is_refused_for_its_tenant_alone(
    limits: dict[str, Any], request_: gateway_pb2.GenerateRequest, limit: str, field: str, words: str
) -> None:
    async def test() -> None:
        both = tenants(acme="key-a", zenith="key-z")
        both["acme"] = replace(both["acme"], limits=replace(NO_LIMITS, **limits))
        async with rig(tenant_settings=both) as r:
            for call in (r.stub.Complete, lambda *a, **k: collect(r.stub.Generate(*a, **k))):
                error = await refused(call(request_, metadata=(("authorization", "Bearer key-a"),)))
                assert error.code() is INVALID
                assert f"{field}: " in str(error.details())
                assert words in str(error.details())
                assert f"(limits.{limit})" in str(error.details())
                assert details(error)["BadRequest"].field_violations[0].field == field
            assert await refusals(r, limit, "acme") == 2
            pending = r.stub.Complete(request_, metadata=(("authorization", "Bearer key-z"),))
            other = await r.next_call()
            assert other.submit.tenant == "zenith"
            await other.send(*((index, [64], LENGTH) for index in range(other.submit.n)))
            await other.end()
            await pending

    run(test())


def test_without_max_tokens_outputs_are_as_long_as_the_limit_lets_them() -> None:
    async def test() -> None:
        async with rig(max_output_tokens=21) as r:
            pending = r.stub.Complete(prompt("hi", n=2))
            call = await r.next_call()
            assert call.submit.sampling.max_tokens == 10
            await call.send((0, [64], LENGTH), (1, [64], LENGTH))
            await call.end()
            await pending

    run(test())


def test_calls_at_the_same_time_are_bounded_and_an_ended_one_makes_room() -> None:
    async def test() -> None:
        async with rig(max_concurrent_calls=2) as r:
            pending, calls = [], []
            for _ in range(2):
                pending.append(r.stub.Complete(prompt("hi")))
                calls.append(await r.next_call())
            error = await refused(r.stub.Complete(prompt("hi")))
            assert error.code() is EXHAUSTED
            assert "3 calls at the same time; must be at most 2" in str(error.details())
            assert details(error)["RetryInfo"].retry_delay.ToMilliseconds() > 0
            await calls[0].finish([64])
            await pending[0]
            third = r.stub.Complete(prompt("hi"))
            await (await r.next_call()).finish([64])
            await third
            await calls[1].finish([64])
            await pending[1]

    run(test())


async def _ends_well(r: Rig, stream: Any, call: FakeCall) -> None:
    await call.finish([64, 65, 66], cached_tokens=4)
    await collect(stream)


async def _is_cancelled(r: Rig, stream: Any, call: FakeCall) -> None:
    await call.send((0, [64, 65]))
    await anext(aiter(stream))
    stream.cancel()
    # The gateway tells the worker when it has let go of the call.
    await call.cancels.get()


async def _is_refused_by_the_worker(r: Rig, stream: Any, call: FakeCall) -> None:
    await call.refuse("full", 1.5)
    await refused(collect(stream))


async def _fails_amid(r: Rig, stream: Any, call: FakeCall) -> None:
    await call.send((0, [64, 65]))
    await anext(aiter(stream))
    await call.end(grpc.StatusCode.INTERNAL, "the model broke")
    await refused(collect(stream))


async def _loses_its_worker(r: Rig, stream: Any, call: FakeCall) -> None:
    await call.send((0, [64, 65]))
    await anext(aiter(stream))
    r.session.close(grpc.StatusCode.UNAVAILABLE, "gone")
    await refused(collect(stream))


ENDINGS: list[Any] = [
    (_ends_well, 9),  # 10 prompt tokens less 4 from the cache, and 3 generated ones
    (_is_cancelled, 12),  # the whole prompt, and what was delivered
    (_is_refused_by_the_worker, 0),
    (_fails_amid, 2),
    (_loses_its_worker, 2),
]


@pytest.mark.parametrize(("ending", "charged"), ENDINGS, ids=[ending.__name__[1:] for ending, _ in ENDINGS])
def test_a_call_is_charged_what_it_used_however_it_ends(ending: Any, charged: int) -> None:
    async def test() -> None:
        async with rig(tokens_per_minute=100, max_concurrent_calls=1, quota_clock=Clock()) as r:
            stream = r.stub.Generate(prompt("0123456789", sampling=sampled(50)))
            call = await r.next_call()
            await ending(r, stream, call)
            # There is room for the next call once the one before has closed, and for one alone.
            await _until_closed(r)
            assert await r.metric(CHARGED) == charged
            assert await _left(r) == 100 - charged

    run(test())


async def _until_closed(r: Rig) -> None:
    while await r.metric("prefixgate_gateway_live_calls"):
        pass


async def _left(r: Rig) -> int:
    """Work out how many tokens are left, by asking for all that there can be."""
    if not r.server.is_ready:
        r.session = await r.worker.sessions.get()
    asking = asyncio.ensure_future(r.stub.Complete(prompt("0123456789", sampling=sampled(90))))
    admitted = asyncio.create_task(r.next_call())
    await asyncio.wait([asking, admitted], return_when=asyncio.FIRST_COMPLETED)
    if admitted.done():
        asking.cancel()
        return 100
    admitted.cancel()
    error = await refused(asking)
    assert error.code() is EXHAUSTED
    milliseconds: int = details(error)["RetryInfo"].retry_delay.ToMilliseconds()
    return round(100 - milliseconds * 100 / 60_000)


def test_what_a_call_has_reserved_is_not_there_for_another_until_it_ends() -> None:
    async def test() -> None:
        async with rig(tokens_per_minute=100, quota_clock=Clock()) as r:
            first = r.stub.Complete(prompt("0123456789", sampling=sampled(50)))
            call = await r.next_call()
            error = await refused(r.stub.Complete(prompt("0123456789", sampling=sampled(50))))
            assert "the call may use 60 tokens, more than is left of 100 per minute" in str(error.details())
            assert details(error)["RetryInfo"].retry_delay.ToMilliseconds() == 12_000
            await call.finish([64])
            await first
            again = r.stub.Complete(prompt("0123456789", sampling=sampled(50)))
            await (await r.next_call()).finish([64])
            await again
            assert await r.metric(CHARGED) == 22

    run(test())


def test_cancels_at_random_leave_nothing_taken() -> None:
    width, rounds = 10, scaled(1000)

    async def one(r: Rig, index: int) -> None:
        pending = r.stub.Complete(prompt("hi", sampling=sampled(5)))
        for _ in range(3 * index):
            await asyncio.sleep(0)
        pending.cancel()
        await asyncio.wait([asyncio.ensure_future(pending)])

    async def test() -> None:
        plenty = 100 * rounds * width
        async with rig(max_concurrent_calls=width, tokens_per_minute=plenty, quota_clock=Clock()) as r:
            for _ in range(rounds):
                await asyncio.gather(*(one(r, index) for index in range(width)))
                await _until_closed(r)
            charged = round(await r.metric(CHARGED))
            assert charged <= rounds * width * 2  # two prompt tokens each, and nothing was generated
            while not r.session.calls.empty():
                r.session.calls.get_nowait()
            pending = [r.stub.Complete(prompt("hi", sampling=sampled(5))) for _ in range(width)]
            for call in [await r.next_call() for _ in pending]:
                await call.finish([64])
            await asyncio.gather(*pending)

    run(test())


def test_a_worker_that_counts_more_cached_than_there_was_gives_nothing_away() -> None:
    async def test() -> None:
        async with rig(tokens_per_minute=100, quota_clock=Clock()) as r:
            pending = r.stub.Complete(prompt("0123456789", sampling=sampled(5)))
            await (await r.next_call()).finish([64, 65], cached_tokens=1000)
            await pending
            assert await r.metric(CHARGED) == 2

    run(test())


SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"]


async def call_method(r: Rig, name: str, **fields: Any) -> Any:
    """Call a method of any kind, with those of some fields that its request has."""
    request_type: Any = getattr(gateway_pb2, SERVICE.methods_by_name[name].input_type.name)
    known = request_type.DESCRIPTOR.fields_by_name
    call = getattr(r.stub, name)(request_type(**{key: value for key, value in fields.items() if key in known}))
    return await (collect(call) if SERVICE.methods_by_name[name].server_streaming else call)


@pytest.mark.parametrize("name", SERVICE.methods_by_name)
def test_no_method_is_a_way_around_what_is_used_over_time(name: str) -> None:
    async def test() -> None:
        async with rig(requests_per_minute=1, max_concurrent_calls=1, quota_clock=Clock()) as r:
            await r.stub.Tokenize(gateway_pb2.TokenizeRequest(prompt="hi"))
            error = await refused(call_method(r, name, prompt="hi"))
            assert error.code() is EXHAUSTED
            assert "RetryInfo" in details(error)

    run(test())


@pytest.mark.parametrize(
    "name", [name for name, method in SERVICE.methods_by_name.items() if "prompt" in method.input_type.fields_by_name]
)
def test_no_method_takes_a_prompt_that_is_too_long(name: str) -> None:
    async def test() -> None:
        async with rig(max_prompt_bytes=4, max_prompt_tokens=3) as r:
            for text, limit in (("hello", "max_prompt_bytes"), ("four", "max_prompt_tokens")):
                if name == "Tokenize" and limit == "max_prompt_tokens":
                    continue  # which tells how many there are
                error = await refused(call_method(r, name, prompt=text, ttl_seconds=60.0))
                assert error.code() is INVALID
                assert f"(limits.{limit})" in str(error.details())
            assert r.session.calls.empty()

    run(test())


def test_computing_a_prompt_into_the_cache_is_charged_like_any_prompt() -> None:
    async def test() -> None:
        async with rig(tokens_per_minute=100, quota_clock=Clock()) as r:
            reading = asyncio.ensure_future(collect(r.stub.Warm(gateway_pb2.WarmRequest(prompt="0123456789"))))
            call = await r.next_call()
            error = await refused(r.stub.Complete(prompt("hi", sampling=sampled(90))))
            assert "the call may use 92 tokens, more than is left of 100 per minute" in str(error.details())
            await call.end(prompt_tokens=10, cached_tokens=4)
            await reading
            assert await r.metric(CHARGED) == 6

    run(test())


def test_a_message_that_is_too_long_is_refused_and_the_next_call_is_answered() -> None:
    async def test() -> None:
        async with rig(max_message_bytes=1 << 20, max_prompt_bytes=1 << 19) as r:
            long = gateway_pb2.TokenizeRequest(prompt="x" * ((1 << 20) + 1))
            assert (await refused(r.stub.Tokenize(long))).code() is EXHAUSTED
            assert (await r.stub.Tokenize(gateway_pb2.TokenizeRequest(prompt="hi"))).token_ids

    run(test())


def test_of_one_connection_so_many_calls_are_taken_and_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_STREAMS", 3)

    async def test() -> None:
        async with rig() as r:
            asking = [asyncio.create_task(collect(r.stub.Generate(prompt(str(number))))) for number in range(5)]
            calls = [await r.next_call() for _ in range(3)]
            # One more than can be at the gateway, by another connection: it is not kept waiting.
            async with gateway_client(r.server) as other:
                asking.append(asyncio.create_task(collect(other.stub.Generate(prompt("other")))))
                calls.append(await r.next_call())
                assert await r.metric("prefixgate_gateway_live_calls") == 4
                for _ in range(2):
                    await answer(calls.pop(0))
                    calls.append(await r.next_call())
                for call in calls:
                    await answer(call)
                assert all([(await one)[-1].HasField("completion") for one in asking])

    async def answer(call: FakeCall) -> None:
        await call.send((0, [65], LENGTH))
        await call.end()

    run(test())
