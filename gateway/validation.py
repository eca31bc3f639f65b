"""What a request must keep to before anything is done for it. Rules that both hops check are in ``proto.fields``."""

from typing import NamedTuple

import grpc

from prefixgate.gateway.errors import CallError
from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2
from prefixgate.proto.fields import (
    NumberRule,
    check_cache,
    check_ids,
    check_lengths,
    check_number,
    check_priority,
    check_prompt_length,
    check_sampling,
    check_text,
    check_time_limit,
    invalid,
    shown,
)

MAX_MESSAGES = 4096
MAX_ROLE_BYTES = 64
MAX_STOPS = 16
MAX_STOP_BYTES = 1024


class Limits(NamedTuple):
    """Bounds that the operator sets."""

    default_max_tokens: int
    max_outputs: int
    max_prompt_bytes: int


def check_generate(request: gateway_pb2.GenerateRequest, model: worker_pb2.ModelDescription, limits: Limits) -> None:
    """Check everything that can be said before the prompt's tokens are known. Raises FieldError or CallError."""
    check_request_id(request.request_id)
    if request.model and request.model != model.model:
        raise CallError(grpc.StatusCode.NOT_FOUND, f"model: {shown(request.model)} is not served here")
    if request.HasField("n"):
        check_number(NumberRule("n", 1, limits.max_outputs), request.n)
    _check_stops(request)
    check_cache(request.cache)
    check_sampling(request.sampling, model.vocabulary_size, model.eos_ids)
    check_time_limit(request)
    check_priority(request)
    check_input(request, limits.max_prompt_bytes)
    if request.WhichOneof("input") == "token_ids":
        check_prompt_length("token_ids", len(request.token_ids.ids), model.context_length)
        check_ids("token_ids", request.token_ids.ids, model.vocabulary_size)


def check_request_id(request_id: str) -> None:
    """Check the caller's name for a call."""
    check_text("request_id", request_id)
    if not (request_id.isascii() and request_id.isprintable()):
        raise invalid("request_id", f"{shown(request_id)} is not printable ASCII")


def check_input(request: gateway_pb2.GenerateRequest | gateway_pb2.TokenizeRequest, max_prompt_bytes: int) -> None:
    """Check that there is an input, and that its text is not too long to be encoded."""
    match request.WhichOneof("input"):
        case None:
            names = [field.name for field in request.DESCRIPTOR.oneofs_by_name["input"].fields]
            raise invalid("input", f"is not set; one of {', '.join(names)} must be")
        case "prompt":
            check_text("prompt", request.prompt, high=max_prompt_bytes)
        case "chat":
            _check_chat(request.chat, max_prompt_bytes)


def _check_chat(chat: gateway_pb2.Chat, max_prompt_bytes: int) -> None:
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise invalid("chat.messages", f"{len(chat.messages)} messages; must be at least 1 and at most {MAX_MESSAGES}")
    size = 0
    for index, message in enumerate(chat.messages):
        check_text(f"chat.messages[{index}].role", message.role, low=1, high=MAX_ROLE_BYTES)
        size += len(message.content.encode())
        if size > max_prompt_bytes:
            raise invalid("chat.messages", f"hold more than {max_prompt_bytes} bytes of text, the most that is taken")


def _check_stops(request: gateway_pb2.GenerateRequest) -> None:
    if len(request.stop) > MAX_STOPS:
        raise invalid("stop", f"{len(request.stop)} strings; must be at most {MAX_STOPS}")
    for index, stop in enumerate(request.stop):
        check_text(f"stop[{index}]", stop, low=1, high=MAX_STOP_BYTES)


def complete_sampling(
    request: gateway_pb2.GenerateRequest, prompt_tokens: int, model: worker_pb2.ModelDescription, limits: Limits
) -> generation_pb2.SamplingParams:
    """Check what depends on the prompt's length, and return the sampling parameters with ``max_tokens`` set."""
    check_prompt_length(request.WhichOneof("input") or "input", prompt_tokens, model.context_length)
    sampling = generation_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    if not sampling.HasField("max_tokens"):
        sampling.max_tokens = min(limits.default_max_tokens, model.context_length - prompt_tokens)
    check_lengths(sampling, prompt_tokens, num_outputs(request), model.context_length)
    _check_cost(prompt_tokens, num_outputs(request), sampling.max_tokens, model.max_call_tokens)
    return sampling


def num_outputs(request: gateway_pb2.GenerateRequest) -> int:
    """Return how many outputs a request asks for."""
    return request.n if request.HasField("n") else 1


def _check_cost(prompt_tokens: int, outputs: int, max_tokens: int, max_call_tokens: int) -> None:
    """Refuse what the worker's pool could never hold. The last token of an output needs no slot of its own."""
    needed = prompt_tokens + outputs * (max_tokens - 1)
    if needed > max_call_tokens:
        raise invalid(
            "sampling.max_tokens",
            f"{max_tokens} is too many: a prompt of {prompt_tokens} tokens with {outputs} outputs of that length needs "
            f"{needed} tokens of cache, and a call can have at most {max_call_tokens}",
        )
