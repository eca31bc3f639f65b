"""Inputs to ids off the event loop: template and tokenizer errors are the client's, and long prompts stop nobody."""

import asyncio
import threading
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixgate.gateway.tokenizer import ModelTokenizer
from prefixgate.proto import gateway_pb2
from prefixgate.proto.transport import text_digest
from tests.gateway import sample_tokenizers
from tests.gateway.fake_worker import FakeWorker, describe
from tests.gateway.rig import chat, prompt, rig, run

ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


def worker_with(chat_template: str, tokenizer: bytes = b"") -> FakeWorker:
    tokenizer = tokenizer or sample_tokenizers.byte_level()
    digest = text_digest(tokenizer, chat_template)
    return FakeWorker(describe(tokenizer=tokenizer, chat_template=chat_template, text_digest=digest))


async def refusal(pending: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pending
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details() or ""


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ALTERNATING, "chat.messages: are refused by the chat template: Conversation roles must alternate"),
        ("{{ messages[7].content }}", "chat.messages: are refused by the chat template"),
        ("{{ messages | map('no_filter') | list }}", "chat.messages: "),
        ("{% if false %}x{% endif %}", "chat: comes to 0 tokens"),
        ("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", "chat.messages: come to more than"),
        ("", "chat: this model has no chat template"),
    ],
)
def test_what_the_template_does_not_take_is_the_clients_error(template: str, words: str) -> None:
    async def test() -> None:
        async with rig(worker_with(template), max_prompt_bytes=1000) as r:
            assert (await refusal(r.stub.Complete(chat(("user", "hi"), ("user", "ho"))))).startswith(words)
            pending = r.stub.Complete(prompt("hi"))
            await (await r.next_call()).finish([64])
            await pending

    run(test())


def test_a_text_that_can_only_be_a_control_token_is_refused_by_field() -> None:
    async def test() -> None:
        async with rig(worker_with(sample_tokenizers.CHATML, sample_tokenizers.metaspace())) as r:
            assert (await refusal(r.stub.Complete(prompt("the<s>")))).startswith("prompt: ")
            assert (await refusal(r.stub.Complete(chat(("user", "the<s>"))))).startswith("chat.messages: ")

    run(test())


def test_content_made_of_special_tokens_has_the_room_of_its_own_length() -> None:
    """Inside the gateway such text is longer for a while, which is no matter of the client's."""

    async def test() -> None:
        async with rig(max_prompt_bytes=1000) as r:
            request = gateway_pb2.TokenizeRequest(chat=chat(("user", "<s>" * 250)).chat)
            ids = (await r.stub.Tokenize(request)).token_ids
            assert ModelTokenizer(sample_tokenizers.byte_level()).tokenizer.decode(ids).count("<s>") == 250
            request = gateway_pb2.TokenizeRequest(chat=chat(("user", "<s>" * 330)).chat)
            assert "more than 1000" in await refusal(r.stub.Tokenize(request))

    run(test())


def test_a_prompt_that_is_being_encoded_stops_nobody_and_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, release = threading.Event(), threading.Event()
    original = ModelTokenizer.encode_prompt

    def slow(self: ModelTokenizer, text: str) -> list[int]:
        if text == "slow":
            encoding.set()
            release.wait(10)
        return original(self, text)

    monkeypatch.setattr(ModelTokenizer, "encode_prompt", slow)

    async def test() -> None:
        async with rig() as r:
            stream = r.stub.Generate(prompt("quick"))
            call = await r.next_call()
            pending = r.stub.Complete(prompt("slow"))
            await asyncio.to_thread(encoding.wait, 10)
            # Health is answered and the other stream goes on while a thread is busy.
            assert await r.health() == 1
            await call.send((0, [64]))
            response: Any = await stream.read()
            assert response.deltas[0].text == "a"
            pending.cancel()
            while await r.metric("prefixgate_gateway_live_calls") > 1:
                pass
            release.set()
            await call.finish([65])
            response = await stream.read()
            assert response.deltas[0].text == "b"
            assert r.session.calls.empty()

    try:
        run(test())
    finally:
        release.set()


def test_a_huge_prompt_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr(ModelTokenizer, "encode_prompt", never)
    monkeypatch.setattr(ModelTokenizer, "shield", never)

    async def test() -> None:
        async with rig() as r:
            text = "x" * (50 << 20)
            assert (await refusal(r.stub.Complete(prompt(text)))).startswith("prompt: ")
            assert (await refusal(r.stub.Complete(chat(("user", text))))).startswith("chat.messages[0].content: ")

    run(test())
