from typing import Any

import pytest

from prefixgate.gateway.client.prompt import Conversation, Message, set_input
from prefixgate.proto import gateway_pb2


def test_each_kind_of_prompt_sets_its_own_field() -> None:
    request = gateway_pb2.GenerateRequest()
    set_input(request, "text")
    assert request == gateway_pb2.GenerateRequest(prompt="text")
    request = gateway_pb2.GenerateRequest()
    set_input(request, [1, 2])
    assert request == gateway_pb2.GenerateRequest(token_ids=gateway_pb2.TokenIds(ids=[1, 2]))
    request = gateway_pb2.GenerateRequest()
    set_input(request, Conversation("brief", [Message("user", "hi")]))
    assert [(message.role, message.content) for message in request.chat.messages] == [
        ("system", "brief"),
        ("user", "hi"),
    ]


@pytest.mark.parametrize("prompt", ["", [], Conversation()])
def test_an_empty_prompt_is_sent_as_one_for_the_gateway_to_refuse(prompt: Any) -> None:
    request = gateway_pb2.GenerateRequest()
    set_input(request, prompt)
    assert request.WhichOneof("input") is not None


def test_token_ids_cannot_be_tokenized() -> None:
    with pytest.raises(TypeError, match="only text and messages"):
        set_input(gateway_pb2.TokenizeRequest(), [1])


@pytest.mark.parametrize("prompt", ["a\udc80", [Message("user", "a\udc80")], [Message("a\udc80", "")]])
def test_text_that_is_not_utf_8_is_refused_by_name(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"(prompt|content|role): is not text that UTF-8 can hold"):
        set_input(gateway_pb2.GenerateRequest(), prompt)


def test_asking_leaves_a_conversation_as_it_is() -> None:
    conversation = Conversation("brief")
    assert conversation.asking("hi") == [Message("system", "brief"), Message("user", "hi")]
    assert conversation.messages == [Message("system", "brief")]
    conversation.add("hi", "hello")
    assert conversation.asking("more")[1:] == [
        Message("user", "hi"),
        Message("assistant", "hello"),
        Message("user", "more"),
    ]
