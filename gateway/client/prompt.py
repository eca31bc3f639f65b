"""What a call can start from: text, token ids, or a conversation."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from prefixgate.proto import gateway_pb2


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    """Most often "system", "user" or "assistant": what the served model's chat template knows."""
    content: str


class Conversation:
    """What was said so far. Each new turn is sent with all before it, which the cache then holds."""

    def __init__(self, system: str = "", messages: Iterable[Message] = ()) -> None:
        """``system`` comes first, where it is not empty."""
        self.messages: list[Message] = [Message("system", system)] if system else []
        self.messages += messages

    def asking(self, question: str) -> list[Message]:
        """Give the conversation with one more question. It stays as it is until the answer is added."""
        return [*self.messages, Message("user", question)]

    def add(self, question: str, answer: str) -> None:
        """Add a question and its answer."""
        self.messages += (Message("user", question), Message("assistant", answer))


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Conversation
"""Raw text, token ids, or the messages of a conversation, rendered through the served model's chat template."""


Request: TypeAlias = (
    gateway_pb2.GenerateRequest
    | gateway_pb2.TokenizeRequest
    | gateway_pb2.ExplainRequest
    | gateway_pb2.WarmRequest
    | gateway_pb2.PinRequest
)
"""A request that starts from a prompt."""


def set_input(request: Request, prompt: Prompt) -> None:
    """Write a prompt into a request. Raises TypeError for a kind that it has no field for, ValueError for bad text."""
    if isinstance(prompt, str):
        request.prompt = _checked("prompt", prompt)
        return
    items = prompt.messages if isinstance(prompt, Conversation) else prompt
    messages = [item for item in items if isinstance(item, Message)]
    if messages:
        for message in messages:
            request.chat.messages.add(role=_checked("role", message.role), content=_checked("content", message.content))
    elif isinstance(request, gateway_pb2.TokenizeRequest):
        raise TypeError("prompt: only text and messages can be tokenized")
    else:
        request.token_ids.ids.extend(item for item in items if not isinstance(item, Message))


def _checked(name: str, text: str) -> str:
    """Refuse text with surrogates, which a shell makes of bytes that are not UTF-8; protobuf names no field."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: is not text that UTF-8 can hold: {error.reason} at {error.start}") from error
    return text
