"""Every rule of a request, at its bounds, on every method that takes one, and the next call is fine."""

import math
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest  # type: ignore[import-untyped]
from grpc_status import rpc_status

from prefixgate.proto import gateway_pb2, generation_pb2
from tests.gateway.fake_worker import FakeCall, FakeWorker, describe
from tests.gateway.rig import Rig, chat, collect, prompt, rig, run

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CONTEXT = 64
VOCABULARY = 1000
MAX_PROMPT_BYTES = 1000
SETTINGS: dict[str, Any] = {"max_outputs": 4, "max_prompt_bytes": MAX_PROMPT_BYTES, "default_max_tokens": 10}

Change = Callable[[gateway_pb2.GenerateRequest], object]


def sampling(**fields: Any) -> Change:
    return lambda request: request.sampling.MergeFrom(generation_pb2.SamplingParams(**fields))


def cache(**fields: Any) -> Change:
    return lambda request: request.cache.MergeFrom(generation_pb2.CacheControl(**fields))


def fields(**values: Any) -> Change:
    return lambda request: request.MergeFrom(gateway_pb2.GenerateRequest(**values))


def both(max_tokens: int, n: int) -> Change:
    return lambda request: (sampling(max_tokens=max_tokens)(request), fields(n=n)(request))


def ids(*token_ids: int) -> Change:
    return fields(token_ids=gateway_pb2.TokenIds(ids=token_ids))


def says(*messages: tuple[str, str]) -> Change:
    return lambda request: request.MergeFrom(chat(*messages))


REFUSED: list[tuple[str, grpc.StatusCode, Change]] = [
    ("input", INVALID, lambda request: request.ClearField("prompt")),
    ("prompt", INVALID, fields(prompt="")),
    ("prompt", INVALID, fields(prompt="x" * (MAX_PROMPT_BYTES + 1))),
    ("prompt", INVALID, fields(prompt="é" * (MAX_PROMPT_BYTES // 2 + 1))),
    ("prompt", INVALID, fields(prompt="x" * CONTEXT)),
    ("token_ids.ids", INVALID, ids()),
    ("token_ids.ids", INVALID, ids(VOCABULARY)),
    ("token_ids.ids", INVALID, ids(1, 2**31)),
    ("token_ids.ids", INVALID, ids(2**32 - 1, 1)),
    ("token_ids.ids", INVALID, ids(*[1] * CONTEXT)),
    ("token_ids.ids", INVALID, ids(*[1] * (CONTEXT + 1))),
    ("chat.messages", INVALID, fields(chat=gateway_pb2.Chat())),
    ("chat.messages", INVALID, says(*[("user", "")] * 4097)),
    ("chat.messages", INVALID, says(("user", "x" * 600), ("user", "x" * 600))),
    ("chat.messages", INVALID, says(*[("user", "")] * 100)),  # too long only once rendered
    ("chat.messages[0].role", INVALID, says(("", "hi"))),
    ("chat.messages[1].role", INVALID, says(("user", "hi"), ("r" * 65, "hi"))),
    ("n", INVALID, fields(n=0)),
    ("n", INVALID, fields(n=-1)),
    ("n", INVALID, fields(n=5)),
    ("n", INVALID, fields(n=10**6)),
    ("stop[0]", INVALID, fields(stop=[""])),
    ("stop[1]", INVALID, fields(stop=["a", ""])),
    ("stop[0]", INVALID, fields(stop=["x" * 1025])),
    ("stop[0]", INVALID, fields(stop=["x" * 1_000_000])),
    ("stop", INVALID, fields(stop=["x"] * 17)),
    ("stop", INVALID, fields(stop=["x"] * 10_000)),
    ("request_id", INVALID, fields(request_id="r" * 129)),
    ("request_id", INVALID, fields(request_id="r" * 1_000_000)),
    ("request_id", INVALID, fields(request_id="é")),
    ("request_id", INVALID, fields(request_id="a\0b")),
    ("request_id", INVALID, fields(request_id="a\nb")),
    ("sampling.max_tokens", INVALID, sampling(max_tokens=0)),
    ("sampling.max_tokens", INVALID, sampling(max_tokens=-1)),
    ("sampling.max_tokens", INVALID, sampling(max_tokens=CONTEXT - 1)),
    ("sampling.max_tokens", INVALID, sampling(max_tokens=2**31)),
    ("sampling.temperature", INVALID, sampling(temperature=-0.1)),
    ("sampling.temperature", INVALID, sampling(temperature=math.nan)),
    ("sampling.temperature", INVALID, sampling(temperature=math.inf)),
    ("sampling.temperature", INVALID, sampling(temperature=1e308)),
    ("sampling.top_k", INVALID, sampling(top_k=0)),
    ("sampling.top_k", INVALID, sampling(top_k=-1)),
    ("sampling.top_p", INVALID, sampling(top_p=0.0)),
    ("sampling.top_p", INVALID, sampling(top_p=1.0001)),
    ("sampling.top_p", INVALID, sampling(top_p=-math.inf)),
    ("sampling.stop_ids", INVALID, sampling(stop_ids=[VOCABULARY])),
    ("sampling.stop_ids", INVALID, sampling(stop_ids=[1] * 65)),
    ("cache.salt", INVALID, cache(salt="s" * 129)),
    ("cache.mode", INVALID, cache(mode=9)),
    ("cache.ttl_seconds", INVALID, cache(ttl_seconds=0.0)),
    ("cache.ttl_seconds", INVALID, cache(ttl_seconds=86_401.0)),
    ("cache.ttl_seconds", INVALID, cache(ttl_seconds=math.nan)),
    ("cache.ttl_seconds", INVALID, cache(ttl_seconds=1.0, mode=generation_pb2.CACHE_MODE_READ_ONLY)),
    ("cache.retention", INVALID, cache(retention=-1)),
    ("cache.retention", INVALID, cache(retention=101)),
    ("priority", INVALID, fields(priority=101)),
    ("priority", INVALID, fields(priority=-101)),
    ("time_limit_ms", INVALID, fields(time_limit_ms=0)),
    ("time_limit_ms", INVALID, fields(time_limit_ms=-1)),
    ("sampling.min_p", INVALID, sampling(min_p=-0.1)),
    ("sampling.min_tokens", INVALID, sampling(min_tokens=-1)),
    ("sampling.min_tokens", INVALID, sampling(min_tokens=11)),  # more than the default of max_tokens
    ("sampling.repetition_penalty", INVALID, sampling(repetition_penalty=0.0)),
    ("sampling.presence_penalty", INVALID, sampling(presence_penalty=math.nan)),
    ("sampling.frequency_penalty", INVALID, sampling(frequency_penalty=2.1)),
    ("sampling.logit_bias", INVALID, sampling(logit_bias=dict.fromkeys(range(100_000), 1.0))),
    ("sampling.logit_bias", INVALID, sampling(logit_bias={VOCABULARY: 1.0})),
    ("sampling.logit_bias[1]", INVALID, sampling(logit_bias={1: math.inf})),
    ("sampling.allowed_ids", INVALID, sampling(allowed_ids=[VOCABULARY])),
    ("sampling.allowed_ids", INVALID, sampling(allowed_ids=[0], min_tokens=1)),  # the model's EOS
    ("sampling.banned_ids", INVALID, sampling(banned_ids=[1] * (VOCABULARY + 1))),
    ("sampling.banned_ids", INVALID, sampling(banned_ids=range(VOCABULARY))),
    ("sampling.logprobs", INVALID, sampling(logprobs=21)),
    ("sampling.prompt_logprobs", INVALID, sampling(prompt_logprobs=10**6)),
]

TAKEN: list[Change] = [
    ids(0, VOCABULARY - 1),
    ids(*[1] * (CONTEXT - 1)),
    fields(prompt="x" * (CONTEXT - 1)),
    fields(prompt=" \0\n"),
    says(("user", "")),
    fields(stop=[]),
    fields(stop=["a", "a", "x" * 1024, "\0"]),
    fields(request_id="r" * 128),
    fields(n=4),
    fields(model="fake"),
    sampling(max_tokens=1),
    sampling(max_tokens=CONTEXT - 2),
    sampling(temperature=0.0),
    sampling(temperature=1e-310),
    sampling(top_k=2**63 - 1),
    sampling(top_p=1.0),
    sampling(seed=-(2**63)),
    sampling(seed=2**63 - 1),
    sampling(min_p=1.0, min_tokens=10, repetition_penalty=0.01, presence_penalty=-2.0, frequency_penalty=2.0),
    sampling(logit_bias={0: -100.0, VOCABULARY - 1: 100.0}, allowed_ids=[1, 2], banned_ids=[1]),
    sampling(logprobs=20, prompt_logprobs=20),
    fields(time_limit_ms=2**63 - 1),
    cache(salt="\0" * 128),
]


def make(change: Change) -> gateway_pb2.GenerateRequest:
    request = prompt("hi")
    change(request)
    return request


def small_worker() -> FakeWorker:
    return FakeWorker(describe(context_length=CONTEXT, vocabulary_size=VOCABULARY, max_call_tokens=1000))


async def answer(call: FakeCall) -> None:
    n = call.submit.n
    await call.send(*((index, [1], generation_pb2.FINISH_REASON_LENGTH) for index in range(n)))
    await call.end(prompt_tokens=len(call.submit.token_ids), completion_tokens=n)


async def refusal(pending: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pending
    return caught.value


def check_refusal(error: grpc.aio.AioRpcError, code: grpc.StatusCode, field: str) -> None:
    details = error.details() or ""
    assert (error.code(), details.partition(": ")[0]) == (code, field), details
    assert len(details) < 500
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # has what it needs
    violation = BadRequest()
    assert status.details[0].Unpack(violation)
    assert [entry.field for entry in violation.field_violations] == [field]


def test_what_breaks_a_rule_is_refused_by_generate_and_complete_alike() -> None:
    async def test() -> None:
        async with rig(small_worker(), **SETTINGS) as r:
            for field, code, change in REFUSED:
                check_refusal(await refusal(collect(r.stub.Generate(make(change)))), code, field)
                check_refusal(await refusal(r.stub.Complete(make(change))), code, field)
            assert r.session.calls.empty()
            await complete_one(r, prompt("hi"))

    run(test())


async def complete_one(r: Rig, request: gateway_pb2.GenerateRequest) -> gateway_pb2.CompleteResponse:
    answering = r.next_call()
    pending = r.stub.Complete(request)
    await answer(await answering)
    return await pending


@pytest.mark.parametrize("change", TAKEN)
def test_what_keeps_to_the_rules_is_taken(change: Change) -> None:
    async def test() -> None:
        async with rig(small_worker(), **SETTINGS) as r:
            response = await complete_one(r, make(change))
            assert len(response.outputs) == (make(change).n or 1)

    run(test())


def test_tokenize_keeps_to_the_same_bounds() -> None:
    async def test() -> None:
        async with rig(small_worker(), **SETTINGS) as r:
            for field, code, change in REFUSED:
                request = make(change)
                if request.WhichOneof("input") == "token_ids" or not field.startswith(("input", "prompt", "chat")):
                    continue
                asked = gateway_pb2.TokenizeRequest()
                asked.MergeFromString(gateway_pb2.GenerateRequest(prompt=request.prompt).SerializeToString())
                if request.WhichOneof("input") == "chat":
                    asked = gateway_pb2.TokenizeRequest(chat=request.chat)
                elif request.WhichOneof("input") is None:
                    asked = gateway_pb2.TokenizeRequest()
                elif len(request.prompt.encode()) <= MAX_PROMPT_BYTES:
                    continue  # too long, or too short, for the context only
                check_refusal(await refusal(r.stub.Tokenize(asked)), code, field)

    run(test())


def test_an_unknown_model_is_not_found() -> None:
    async def test() -> None:
        async with rig(small_worker(), **SETTINGS) as r:
            for name in ("other", "fake\0", "x" * 1_000_000):
                error = await refusal(r.stub.Complete(prompt("hi", model=name)))
                assert error.code() is grpc.StatusCode.NOT_FOUND
                assert len(error.details() or "") < 200

    run(test())


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "expected"),
    [(2, None, 10), (CONTEXT - 5, None, 5), (CONTEXT - 1, None, 1), (2, 1, 1), (2, CONTEXT - 2, CONTEXT - 2)],
)
def test_an_absent_max_tokens_is_the_default_cut_to_the_context(
    prompt_tokens: int, asked: int | None, expected: int
) -> None:
    async def test() -> None:
        async with rig(small_worker(), **SETTINGS) as r:
            request = make(ids(*[1] * prompt_tokens))
            if asked is not None:
                request.sampling.max_tokens = asked
            pending = r.stub.Complete(request)
            call = await r.next_call()
            assert call.submit.sampling.max_tokens == expected
            await answer(call)
            await pending

    run(test())


def test_what_the_pool_could_never_hold_is_refused_before_it_is_sent() -> None:
    async def test() -> None:
        worker = FakeWorker(describe(context_length=CONTEXT, vocabulary_size=VOCABULARY, max_call_tokens=50))
        async with rig(worker, **SETTINGS) as r:
            request = make(ids(*[1] * 10))
            request.sampling.max_tokens = 11
            request.n = 4
            await complete_one(r, request)
            request.sampling.max_tokens = 12
            error = await refusal(r.stub.Complete(request))
            check_refusal(error, INVALID, "sampling.max_tokens")
            assert "54 tokens of cache" in (error.details() or "")

    run(test())


def test_a_million_ids_are_refused_in_our_own_words() -> None:
    """About five megabytes: more than gRPC takes by default."""

    async def test() -> None:
        async with rig(small_worker(), **SETTINGS) as r:
            error = await refusal(r.stub.Complete(make(ids(*[2**20] * 1_200_000))))
            check_refusal(error, INVALID, "token_ids.ids")

    run(test())


def test_a_million_ids_pass_both_hops_where_the_context_holds_them() -> None:
    async def test() -> None:
        worker = FakeWorker(describe(context_length=2_000_000, vocabulary_size=2**21, max_call_tokens=2_000_000))
        async with rig(worker, **SETTINGS) as r:
            response = await complete_one(r, make(ids(*[2**20] * 1_200_000)))
            assert response.completion.usage.prompt_tokens == 1_200_000

    run(test())


def test_bytes_that_are_no_request_are_the_clients_fault_and_counted() -> None:
    async def test() -> None:
        async with rig(small_worker(), **SETTINGS) as r:
            for name in ("Generate", "Complete", "Tokenize"):
                call: Any = r.channel.unary_unary(f"/prefixgate.v1.Gateway/{name}")
                error = await refusal(call(b"\x0a\x02\xed\xa0"))
                assert error.code() is INVALID
            sample = 'prefixgate_gateway_calls_refused_total{code="INVALID_ARGUMENT"}'
            assert await r.metric(sample) == 3
            await complete_one(r, prompt("hi"))

    run(test())


BOUND: list[tuple[str, str, str, Change]] = [
    ("max_outputs", "n", "5 is out of range; must be in [1, 4]", fields(n=5)),
    ("max_stops", "stop", "3 strings; must be at most 2", fields(stop=["a", "b", "c"])),
    (
        "max_logit_biases",
        "sampling.logit_bias",
        "4 ids; must be at most 3",
        sampling(logit_bias=dict.fromkeys(range(4), 1.0)),
    ),
    ("max_prompt_bytes", "prompt", "is at least 51 bytes long; must be at most 50", fields(prompt="x" * 51)),
    ("max_prompt_bytes", "prompt", "is at least 52 bytes long; must be at most 50", fields(prompt="é" * 26)),
    (
        "max_prompt_bytes",
        "chat.messages",
        "hold 52 bytes of content; must be at most 50",
        says(*[("user", "é" * 13)] * 2),
    ),
    ("max_prompt_tokens", "token_ids.ids", "11 ids; must be at most 10", ids(*[1] * 11)),
    ("max_prompt_tokens", "prompt", "comes to 11 tokens; must be at most 10", fields(prompt="x" * 11)),
    (
        "max_output_tokens",
        "sampling.max_tokens",
        "4 outputs of 6 tokens are 24; must be at most 20 together",
        both(6, 4),
    ),
]


@pytest.mark.parametrize(("limit", "field", "message", "change"), BOUND, ids=[f"{b[0]} {b[1]}" for b in BOUND])
def test_a_bound_that_the_operator_set_is_looked_up_and_named(
    limit: str, field: str, message: str, change: Change
) -> None:
    bounds: dict[str, Any] = {"max_outputs": 4, "max_stops": 2, "max_logit_biases": 3}
    bounds |= {"max_prompt_bytes": 50, "max_prompt_tokens": 10, "max_output_tokens": 20}

    async def test() -> None:
        async with rig(small_worker(), default_max_tokens=5, **bounds) as r:
            error = await refusal(r.stub.Complete(make(change)))
            check_refusal(error, INVALID, field)
            assert error.details() == f"{field}: {message} (limits.{limit})"
            name = f'prefixgate_gateway_limit_refusals_total{{limit="{limit}",tenant="local"}}'
            assert await r.metric(name) == 1

    run(test())
