"""Both clients against a real gateway whose worker does what the test says."""

import asyncio
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixgate.gateway import client as package
from prefixgate.gateway.client import (
    AsyncClient,
    BrokenStreamError,
    CallCancelledError,
    Client,
    Conversation,
    DeadlineExceededError,
    Delta,
    FieldViolation,
    GatewayError,
    InvalidRequestError,
    Message,
    NotFoundError,
    OverloadedError,
    RetryPolicy,
    UnauthenticatedError,
    UnavailableError,
)
from prefixgate.gateway.tokenizer import ModelTokenizer
from prefixgate.proto import generation_pb2
from tests.gateway import sample_tokenizers
from tests.gateway.client.callers import EAGER, Caller, calling
from tests.gateway.commands.scripted_gateway import saying, scripted
from tests.gateway.fake_worker import LENGTH, STOP, FakeCall
from tests.gateway.rig import rig, run, tenants

Kind = type[Client] | type[AsyncClient]
MODEL = ModelTokenizer(sample_tokenizers.byte_level())


@pytest.fixture(params=[Client, AsyncClient])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


def encode(text: str) -> list[int]:
    return MODEL.encode_prompt(text)


def test_an_answer_streams_and_adds_up(kind: Kind) -> None:
    async def test() -> None:
        async with rig() as r, calling(kind, r) as c:
            stream = c.client.generate("the fox", n=2, request_id="mine")
            call = await r.next_call()
            assert (list(call.submit.token_ids), call.submit.n) == (encode("the fox"), 2)
            await call.send((0, encode("a")), (1, encode("x")))
            first = await c.next(stream)
            assert first == Delta(0, "a", tuple(encode("a")), None, "", ())
            assert stream.text == "a"
            with pytest.raises(BrokenStreamError):
                _ = stream.usage
            await call.send((0, encode("b"), LENGTH), (1, encode("y")))
            await call.send((1, [], STOP))
            await call.end(prompt_tokens=7, cached_tokens=5, completion_tokens=4)
            rest = await c.read(stream)
            assert [(delta.index, delta.text, delta.finish_reason) for delta in rest] == [
                (1, "x", None),
                (0, "b", "length"),
                (1, "y", None),
                (1, "", "stop"),
            ]
            answer = await c.do(stream.result)
            assert [(output.index, output.text, output.token_ids) for output in answer.outputs] == [
                (0, "ab", encode("ab")),
                (1, "xy", encode("xy")),
            ]
            assert [output.finish_reason for output in answer.outputs] == ["length", "stop"]
            assert (answer.text, answer.request_id) == ("ab", "mine")
            assert (answer.model, answer.incarnation) == ("fake", "life-1")
            assert (
                answer.usage
                == stream.usage
                == generation_pb2.Usage(prompt_tokens=7, cached_tokens=5, completion_tokens=4)
            )

    run(test())


def test_complete_gives_what_generate_streams(kind: Kind) -> None:
    async def answer(call: FakeCall) -> None:
        await call.send((0, encode("the "), LENGTH), (1, encode("a")))
        await call.send((1, encode("<|sep|>b")))
        await call.send((1, [], STOP))
        await call.end(completion_tokens=9)

    async def test() -> None:
        async with rig() as r, calling(kind, r) as c:
            options: dict[str, Any] = {"n": 2, "stop": ["<|sep|>"], "request_id": "r"}
            streaming = asyncio.create_task(c.do(c.client.generate("hi", **options).result))
            await answer(await r.next_call())
            whole = asyncio.create_task(c.do(c.client.complete, "hi", **options))
            await answer(await r.next_call())
            assert (await whole) == (await streaming)
            assert [output.matched_stop for output in (await whole).outputs] == ["", "<|sep|>"]

    run(test())


def test_a_conversation_grows_by_the_turns_that_ended_well(kind: Kind) -> None:
    async def test() -> None:
        async with rig() as r, calling(kind, r) as c:
            conversation = Conversation("be brief")
            stream = c.client.chat(conversation, "Which city?")
            reading = asyncio.create_task(c.read(stream))
            await (await r.next_call()).finish(encode("Paris"))
            await reading
            turns = [Message("system", "be brief"), Message("user", "Which city?"), Message("assistant", "Paris")]
            assert conversation.messages == turns
            await c.do(stream.result)
            assert conversation.messages == turns
            # One that is broken off leaves it as it was.
            stream = c.client.chat(conversation, "Why?")
            call = await r.next_call()
            assert MODEL.tokenizer.decode(call.submit.token_ids).count("Paris") == 1
            await c.close(stream)
            with pytest.raises(CallCancelledError):
                await c.next(stream)
            assert conversation.messages == turns

    run(test())


def test_closing_a_stream_cancels_its_call_at_the_worker(kind: Kind) -> None:
    async def test() -> None:
        async with rig() as r, calling(kind, r) as c:
            stream = c.client.generate("hi")
            call = await r.next_call()
            await call.send((0, encode("a")))
            assert (await c.next(stream)).text == "a"
            await c.close(stream)
            await call.cancels.get()
            with pytest.raises(CallCancelledError):
                await c.next(stream)

    run(test())


def test_closing_the_client_cancels_its_calls(kind: Kind) -> None:
    async def test() -> None:
        async with rig() as r:
            async with calling(kind, r) as c:
                reading = asyncio.create_task(c.read(c.client.generate("hi")))
                whole = asyncio.create_task(c.do(c.client.complete, "hi"))
                calls = [await r.next_call(), await r.next_call()]
            for call in calls:
                await call.cancels.get()
            for task in (reading, whole):
                with pytest.raises(CallCancelledError):
                    await task

    run(test())


def test_a_loop_that_is_left_cancels_its_call() -> None:
    async def test() -> None:
        async with rig() as r, calling(Client, r) as c:

            def one() -> str:
                with c.client.generate("hi") as stream:
                    for delta in stream:
                        return str(delta.text)
                return ""

            reading = asyncio.create_task(asyncio.to_thread(one))
            call = await r.next_call()
            await call.send((0, encode("a")))
            assert await reading == "a"
            await call.cancels.get()

    run(test())


def test_the_end_of_a_task_cancels_its_call() -> None:
    async def test() -> None:
        async with rig() as r, calling(AsyncClient, r) as c:
            for begun in (c.client.generate("hi").result(), c.client.complete("hi")):
                reading = asyncio.ensure_future(begun)
                call = await r.next_call()
                reading.cancel()
                await call.cancels.get()
                with pytest.raises(asyncio.CancelledError):
                    await reading

    run(test())


def test_a_dropped_stream_cancels_its_call(kind: Kind) -> None:
    async def test() -> None:
        async with rig() as r, calling(kind, r) as c:
            stream = c.client.generate("hi")
            call = await r.next_call()
            del stream
            await call.cancels.get()

    run(test())


def test_a_call_that_was_turned_away_is_made_again(kind: Kind) -> None:
    async def test() -> None:
        async with rig() as r, calling(kind, r, retry=EAGER) as c:
            for begin in (lambda: c.client.generate("hi").result, lambda: lambda: c.client.complete("hi")):
                answer = asyncio.create_task(c.do(begin()))
                for _ in range(2):
                    await (await r.next_call()).refuse("full", retry_seconds=0.001)
                await (await r.next_call()).finish(encode("ok"))
                assert (await answer).text == "ok"

    run(test())


def test_attempts_are_bounded_and_the_last_error_tells_when_to_come_back(kind: Kind) -> None:
    async def test() -> None:
        async with rig() as r, calling(kind, r, retry=EAGER) as c:
            answer = asyncio.create_task(c.do(c.client.complete, "hi", request_id="mine"))
            for _ in range(EAGER.attempts):
                await (await r.next_call()).refuse("full", retry_seconds=0.25)
            with pytest.raises(OverloadedError) as caught:
                await answer
            assert caught.value.retry_delay == 0.25
            assert caught.value.request_id == "mine"
            assert r.session.calls.empty()

    run(test())


def test_a_call_is_not_made_again_once_something_of_it_has_come(kind: Kind) -> None:
    async def test() -> None:
        async with rig() as r, calling(kind, r, retry=EAGER) as c:
            stream = c.client.generate("hi")
            call = await r.next_call()
            await call.send((0, encode("a")))
            assert (await c.next(stream)).text == "a"
            await call.end(grpc.StatusCode.UNAVAILABLE, "the worker is gone")
            with pytest.raises(UnavailableError, match="the worker is gone"):
                await c.next(stream)
            assert stream.text == "a"
            assert r.session.calls.empty()

    run(test())


def test_other_failures_are_not_tried_again_and_name_the_field(kind: Kind) -> None:
    async def test() -> None:
        async with rig() as r, calling(kind, r, retry=EAGER) as c:
            wrong: dict[str, Any] = {"top_p": 1.5, "request_id": "mine"}
            for begin in (c.client.complete, lambda *given, **fields: c.client.generate(*given, **fields).result()):
                with pytest.raises(InvalidRequestError) as caught:
                    await c.do(begin, "hi", **wrong)
                error = caught.value
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT
                assert [violation.field for violation in error.field_violations] == ["sampling.top_p"]
                assert isinstance(error.field_violations[0], FieldViolation)
                assert "1.5" in error.field_violations[0].description
                assert str(error).startswith("INVALID_ARGUMENT: sampling.top_p: 1.5")
                assert (error.request_id, error.retry_delay) == ("mine", None)
            with pytest.raises(NotFoundError):
                await c.do(c.client.complete, "hi", model="other")
            assert r.session.calls.empty()

    run(test())


def test_a_timeout_ends_the_call_everywhere(kind: Kind) -> None:
    async def test() -> None:
        async with rig() as r, calling(kind, r, timeout=0.2) as c:
            seconds = 0.2
            # A busy machine may need longer than that to carry a call to the worker at all.
            while r.session.calls.empty():
                with pytest.raises(DeadlineExceededError):
                    await c.do(c.client.generate("hi", timeout=seconds).result)
                seconds *= 4
            await (await r.next_call()).cancels.get()
            with pytest.raises(DeadlineExceededError):
                await c.do(c.client.complete, "hi")

    run(test())


def test_the_key_proves_the_tenant(kind: Kind) -> None:
    async def test() -> None:
        async with rig(tenant_settings=tenants(acme="a key")) as r:
            async with calling(kind, r, api_key="a key") as c:
                answer = asyncio.create_task(c.do(c.client.complete, "hi"))
                call = await r.next_call()
                assert call.submit.tenant == "acme"
                await call.finish(encode("ok"))
                assert (await answer).text == "ok"
            async with calling(kind, r, api_key="another") as c:
                with pytest.raises(UnauthenticatedError):
                    await c.do(c.client.stats)

    run(test())


def test_tokenize_and_stats(kind: Kind) -> None:
    async def test() -> None:
        async with rig() as r, calling(kind, r) as c:
            r.worker.report.tenant.running_calls = 3
            assert await c.do(c.client.tokenize, "the fox") == encode("the fox")
            assert len(await c.do(c.client.tokenize, [Message("user", "hi")])) > 2
            stats = await c.do(c.client.stats)
            assert (stats.model, stats.tenant.running_calls, stats.context_length) == ("fake", 3, 2048)

    run(test())


def test_nobody_there(kind: Kind, tmp_path: Path) -> None:
    async def test() -> None:
        client = kind(f"unix:{tmp_path}/nothing.sock", retry=RetryPolicy(attempts=1))
        caller = Caller(client)
        with pytest.raises(UnavailableError) as caught:
            await caller.do(client.stats)
        assert caught.value.request_id == ""
        await caller.do(client.close)

    run(test())


def test_a_gateway_that_comes_late_is_found(kind: Kind, tmp_path: Path) -> None:
    socket = f"unix:{tmp_path}/gateway.sock"
    policy = RetryPolicy(attempts=1000, first_seconds=0.01, max_seconds=0.1)

    async def test() -> None:
        caller = Caller(kind(socket, retry=policy))
        # Its first attempt fails before anything listens.
        first = Caller(kind(socket, retry=RetryPolicy(attempts=1)))
        with pytest.raises(UnavailableError):
            await first.do(first.client.stats)
        answer = asyncio.create_task(caller.do(caller.client.generate("hi").result))
        with scripted(socket) as gateway:
            gateway.script = saying("here")
            assert (await answer).text == "here"
        await caller.do(caller.client.close)
        await first.do(first.client.close)

    run(test())


@pytest.mark.parametrize("key", ["pg-é", "pg-a\nb"])
def test_a_key_that_cannot_be_sent_is_not_repeated(kind: Kind, key: str) -> None:
    async def test() -> None:
        with pytest.raises(ValueError, match="API key") as caught:
            kind(api_key=key)
        assert key not in str(caught.value)

    run(test())


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: Kind) -> dict[str, list[str]]:
        members = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(member).parameters) for name, member in members if name[0] != "_"}

    assert methods(Client) == methods(AsyncClient)
    assert set(methods(Client)) > {"generate", "complete", "chat", "tokenize", "stats", "explain", "warm", "pin"}


def test_the_face_of_the_package_is_what_it_says() -> None:
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
    errors = [value for value in vars(package).values() if isinstance(value, type) and issubclass(value, GatewayError)]
    assert [error.__name__ for error in errors if error.__name__ not in package.__all__] == []


def test_the_client_brings_no_server_along() -> None:
    program = """
import sys
import prefixgate.gateway.client
own = sorted(name for name in sys.modules if name.startswith("prefixgate."))
print([name for name in own if not name.startswith(("prefixgate.gateway.client", "prefixgate.proto"))])
heavy = ("torch", "numpy", "jinja2", "tokenizers", "prometheus_client", "xxhash", "rich")
print([name for name in heavy if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "['prefixgate.gateway']\n[]\n"
