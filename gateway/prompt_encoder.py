"""A request's input to the token ids that the model gets."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from prefixgate.gateway.chat_template import ChatTemplateError
from prefixgate.gateway.encoding_threads import EncodingThreads
from prefixgate.gateway.live_calls import Call
from prefixgate.gateway.metrics import ENCODING, GatewayMetrics
from prefixgate.gateway.served_model import ServedModel
from prefixgate.gateway.tokenizer import ControlTextError
from prefixgate.proto import gateway_pb2
from prefixgate.proto.fields import invalid

T = TypeVar("T")

Request = (
    gateway_pb2.GenerateRequest
    | gateway_pb2.TokenizeRequest
    | gateway_pb2.ExplainRequest
    | gateway_pb2.WarmRequest
    | gateway_pb2.PinRequest
)


class PromptEncoder:
    """Renders and encodes in threads of its own: on the event loop one long prompt would stop every stream."""

    def __init__(self, threads: EncodingThreads, metrics: GatewayMetrics, *, max_prompt_bytes: int) -> None:
        self._threads = threads
        self._metrics = metrics
        self.max_prompt_bytes = max_prompt_bytes
        """Longest rendered text; may be set while calls run."""

    async def encode(self, request: Request, model: ServedModel, call: Call) -> Sequence[int]:
        """Encode the checked input of a call. Raises FieldError for what template or tokenizer do not take.

        When cancelled, the thread ends what it has begun, bounded by the input's size, and the result is dropped.
        """
        started, tenant = time.monotonic(), call.tenant
        match request.WhichOneof("input"):
            case "prompt":
                prompt = request.prompt
                ids = await self._threads.run(
                    lambda: encode_prompt(prompt, model), characters=len(prompt), tenant=tenant
                )
            case "chat":
                chat, most = request.chat, self.max_prompt_bytes
                size = sum(len(message.content) for message in chat.messages)
                ids = await self._threads.run(lambda: encode_chat(chat, model, most), characters=size, tenant=tenant)
            case _:
                assert not isinstance(request, gateway_pb2.TokenizeRequest)
                # All that follows goes through them faster than through the message.
                ids = request.token_ids.ids[:]
                call.record.prompt_tokens = len(ids)
                return ids
        seconds = time.monotonic() - started
        self._metrics.observe(ENCODING, seconds=seconds)
        call.trace.encoded(seconds)
        call.record.prompt_tokens = len(ids)
        return ids

    async def beside(self, work: Callable[[], T], tenant: str) -> T:
        """Run other work on a tenant's prompt in the same threads: whoever has many waits for the others' turns."""
        return await self._threads.run(work, characters=0, tenant=tenant)


def encode_prompt(prompt: str, model: ServedModel) -> list[int]:
    """Encode a raw prompt. Raises FieldError."""
    try:
        return model.tokenizer.encode_prompt(prompt)
    except ControlTextError as error:
        raise invalid("prompt", str(error)) from error


def encode_chat(chat: gateway_pb2.Chat, model: ServedModel, max_prompt_bytes: int) -> list[int]:
    """Render a conversation with the model's template and encode it. Raises FieldError."""
    if model.chat_template is None:
        raise invalid("chat", "this model has no chat template; send prompt or token_ids")
    shield = model.tokenizer.shield
    messages = [{"role": shield(said.role), "content": shield(said.content)} for said in chat.messages]
    growth = sum(len(new["content"]) - len(said.content) for new, said in zip(messages, chat.messages, strict=True))
    try:
        text = model.chat_template.render(messages, max_characters=max_prompt_bytes, extra_characters=max(growth, 0))
        if len(model.tokenizer.unshield(text).encode()) > max_prompt_bytes:
            raise ChatTemplateError(f"come to more than {max_prompt_bytes} bytes in the template")
        return model.tokenizer.encode_rendered(text)
    except (ChatTemplateError, ControlTextError) as error:
        raise invalid("chat.messages", str(error)) from error
