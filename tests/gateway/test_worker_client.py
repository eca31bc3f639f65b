"""The hop to the worker: found when it comes, checked by name, lost in every way, and found again."""

import logging
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixgate.gateway import worker_client
from prefixgate.gateway.backoff import Backoff
from prefixgate.proto import worker_pb2
from prefixgate.proto.transport import PROTOCOL_VERSION, text_digest
from tests.gateway import sample_tokenizers
from tests.gateway.fake_worker import FINGERPRINT, FakeSession, FakeWorker, describe, serving
from tests.gateway.rig import gateway, gateway_client, prompt, rig, run

SERVING, NOT_SERVING = 1, 2


async def status_of(pending: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pending
    return caught.value.code()


def test_the_hello_says_what_the_gateway_believes() -> None:
    async def test() -> None:
        async with rig() as r:
            hello = r.session.hello
            assert (hello.protocol_version, hello.incarnation) == (PROTOCOL_VERSION, "life-1")
            assert hello.hash_key_fingerprint == FINGERPRINT
            assert hello.gateway

    run(test())


def test_a_worker_that_still_loads_is_asked_again_until_it_is_ready(tmp_path: Path) -> None:
    async def test() -> None:
        worker = FakeWorker()
        worker.description = None
        async with (
            serving(worker, tmp_path / "s") as address,
            gateway(address) as server,
            gateway_client(server) as client,
        ):
            for _ in range(2):
                await worker.described.get()
            assert await client.health() == NOT_SERVING
            assert await status_of(client.stub.Complete(prompt("hi"))) is grpc.StatusCode.UNAVAILABLE
            worker.description = describe()
            await client.until_health(SERVING)

    run(test())


def test_a_gateway_may_start_long_before_its_worker(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(f"unix:{tmp_path}/s") as server, gateway_client(server) as client:
            assert await status_of(client.stub.Complete(prompt("hi"))) is grpc.StatusCode.UNAVAILABLE
            worker = FakeWorker()
            async with serving(worker, tmp_path / "s"):
                await worker.sessions.get()
                await client.until_health(SERVING)

    run(test())


NEVER = Backoff(first=1e6, longest=1e6)


def test_a_worker_that_loads_is_asked_again_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "REFUSED", NEVER)
    assert worker_client.ABSENT.longest <= 0.5

    async def test() -> None:
        worker = FakeWorker()
        worker.description = None
        async with serving(worker, tmp_path / "s") as address, gateway(address):
            for _ in range(4):
                await worker.described.get()
            worker.description = describe()
            await worker.sessions.get()

    run(test())


def test_a_worker_that_does_not_fit_is_left_alone_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So soon that the test ends; the other kind of pause never would.
    monkeypatch.setattr(worker_client, "ABSENT", NEVER)
    monkeypatch.setattr(worker_client, "REFUSED", Backoff(first=0.01, longest=0.01))

    async def test() -> None:
        worker = FakeWorker(describe(protocol_version=PROTOCOL_VERSION + 1))
        async with serving(worker, tmp_path / "s") as address, gateway(address):
            for _ in range(3):
                await worker.described.get()
            worker.description = describe()
            await worker.sessions.get()

    run(test())


BAD_TOKENIZER = b"{}"

REFUSED = [
    ({"protocol_version": PROTOCOL_VERSION + 1}, "protocol_version"),
    ({"hash_key_fingerprint": b"other"}, "hash_key_fingerprint"),
    ({"text_digest": b""}, "text_digest"),
    ({"tokenizer": sample_tokenizers.byte_fallback()}, "text_digest"),
    ({"chat_template": "{{ messages }}"}, "text_digest"),
    ({"vocabulary_size": 0}, "vocabulary_size"),
    ({"context_length": 0}, "context_length"),
    ({"max_call_tokens": 0}, "max_call_tokens"),
    ({"model": ""}, "model"),
    ({"incarnation": ""}, "incarnation"),
    ({"tokenizer": BAD_TOKENIZER, "text_digest": text_digest(BAD_TOKENIZER, sample_tokenizers.CHATML)}, "tokenizer"),
    (
        {"chat_template": "{% for", "text_digest": text_digest(sample_tokenizers.byte_level(), "{% for")},
        "chat_template",
    ),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_a_worker_that_differs_is_refused_by_name_and_a_sound_one_taken_later(
    changes: dict[str, Any], named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        worker = FakeWorker(describe(**changes))
        async with (
            serving(worker, tmp_path / "s") as address,
            gateway(address) as server,
            gateway_client(server) as client,
        ):
            for _ in range(2):
                await worker.described.get()
            assert await client.health() == NOT_SERVING
            assert worker.sessions.empty()
            worker.description = describe()
            await client.until_health(SERVING)

    with caplog.at_level(logging.WARNING):
        run(test())
    complaints = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(complaints) == 1
    assert named in complaints[0]


def end_ok(session: FakeSession) -> None:
    session.close()


def end_with_error(session: FakeSession) -> None:
    session.close(grpc.StatusCode.INTERNAL, "the engine died")


def end_refused(session: FakeSession) -> None:
    session.close(grpc.StatusCode.FAILED_PRECONDITION, "incarnation: another life")


@pytest.mark.parametrize("end", [end_ok, end_with_error, end_refused])
@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_stream_that_ends_without_the_calls_end_makes_it_unavailable(end: Any, has_tokens: bool) -> None:
    async def test() -> None:
        async with rig() as r:
            stream = r.stub.Generate(prompt("hi"))
            pending = r.stub.Complete(prompt("hi"))
            calls = [await r.next_call() for _ in range(2)]
            if has_tokens:
                for call in calls:
                    await call.send((0, [1]))
                await stream.read()
            end(r.session)
            assert await status_of(stream.read()) is grpc.StatusCode.UNAVAILABLE
            assert await status_of(pending) is grpc.StatusCode.UNAVAILABLE
            # A new stream is opened, and the next call goes there.
            again = await r.worker.sessions.get()
            await r.until_health(SERVING)
            pending = r.stub.Complete(prompt("hi"))
            await (await again.calls.get()).finish([1])
            await pending

    run(test())


def test_a_worker_that_is_killed_ends_its_calls_and_its_successor_is_found(tmp_path: Path) -> None:
    """The successor is another life with another tokenizer, at the same address."""

    async def test() -> None:
        first, path = FakeWorker(), tmp_path / "s"
        async with gateway(f"unix:{path}") as server, gateway_client(server) as client:
            async with serving(first, path):
                session = await first.sessions.get()
                await client.until_health(SERVING)
                pending = client.stub.Complete(prompt("hi"))
                await (await session.calls.get()).send((0, [1]))
            assert await status_of(pending) is grpc.StatusCode.UNAVAILABLE
            await client.until_health(NOT_SERVING)
            assert await status_of(client.stub.Complete(prompt("hi"))) is grpc.StatusCode.UNAVAILABLE

            tokenizer = sample_tokenizers.byte_fallback()
            second = FakeWorker(
                describe(tokenizer=tokenizer, chat_template="", text_digest=text_digest(tokenizer, ""), incarnation="2")
            )
            async with serving(second, path):
                session = await second.sessions.get()
                assert session.hello.incarnation == "2"
                await client.until_health(SERVING)
                pending = client.stub.Complete(prompt("the"))
                call = await session.calls.get()
                assert call.submit.token_ids[0] == 1  # this tokenizer adds a BOS
                await call.finish(list(call.submit.token_ids)[1:])
                answer = await pending
                assert (answer.outputs[0].text, answer.completion.incarnation) == ("the", "2")

    run(test())


def test_a_call_whose_client_is_slow_gets_its_tokens_before_the_bad_end() -> None:
    async def test() -> None:
        async with rig() as r:
            stream = r.stub.Generate(prompt("hi"))
            call = await r.next_call()
            await call.send((0, [64]))
            await call.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "the pool is full")
            response: Any = await stream.read()
            assert response.deltas[0].text == "a"
            assert await status_of(stream.read()) is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(test())


def test_events_of_unknown_and_of_ended_calls_are_ignored() -> None:
    async def test() -> None:
        async with rig() as r:
            pending = r.stub.Complete(prompt("hi"))
            call = await r.next_call()
            await r.session.step(worker_pb2.CallEvent(call_id=99, end=worker_pb2.CallEnd(code=13)))
            await call.finish([64])
            await call.send((0, [64]))
            await call.end(grpc.StatusCode.INTERNAL)
            assert (await pending).outputs[0].text == "a"
            pending = r.stub.Complete(prompt("hi"))
            await (await r.next_call()).finish([65])
            assert (await pending).outputs[0].text == "b"

    run(test())


def test_one_step_carries_news_of_many_calls() -> None:
    async def test() -> None:
        async with rig() as r:
            pending = [r.stub.Complete(prompt(str(index))) for index in range(8)]
            calls = [await r.next_call() for _ in pending]
            for round_ in range(3):
                await r.session.step(*(call.event((0, [call.submit.token_ids[0]] * (round_ + 1))) for call in calls))
            for call in calls:
                await call.finish([])
            texts = [(await each).outputs[0].text for each in pending]
            assert texts == [str(index) * 6 for index in range(8)]

    run(test())


def test_pauses_between_attempts_grow_to_a_bound_and_vary() -> None:
    backoff = Backoff(first=0.1, longest=5.0)
    assert all(0.05 <= backoff.delay(0) <= 0.1 for _ in range(100))
    assert all(2.5 <= backoff.delay(attempt) <= 5.0 for attempt in (10, 1000, 10**9))


def test_a_gateway_that_stops_closes_its_stream_and_so_ends_its_calls_there() -> None:
    async def test() -> None:
        async with rig() as r:
            pending = r.stub.Complete(prompt("hi"))
            await r.next_call()
            await r.server.stop(0)
            await r.session.closed.wait()
            assert await status_of(pending) is grpc.StatusCode.UNAVAILABLE

    run(test())
