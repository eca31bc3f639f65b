"""What a request must keep to before anything is done for it: the table of fields, and what is the gateway's alone."""

from typing import Any

import grpc

from prefixgate.gateway.call_limits import Limits, check_output_tokens, check_prompt_tokens
from prefixgate.gateway.errors import CallError
from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2
from prefixgate.proto.checks import check_lengths, check_prompt_length
from prefixgate.proto.field_table import GENERATE, TABLE
from prefixgate.proto.fields import Bound, Bounds, invalid, shown

_SETTINGS = {
    Bound.OUTPUTS: "max_outputs",
    Bound.PROMPT_BYTES: "max_prompt_bytes",
    Bound.STOPS: "max_stops",
    Bound.LOGIT_BIASES: "max_logit_biases",
}


def check_request(request: Any, model: worker_pb2.ModelDescription, limits: Limits) -> None:
    """Check a request of any method: all that can be said before the prompt's tokens are known.

    Raises FieldError, and CallError with NOT_FOUND for a model that is not served.
    """
    TABLE[request.DESCRIPTOR.name].check("", request, _bounds(model, limits))
    # Requests that can name a model all call it so.
    name = getattr(request, "model", "")
    if name and name != model.model:
        raise CallError(grpc.StatusCode.NOT_FOUND, f"model: {shown(name)} is not served here")


def check_request_id(request_id: str) -> None:
    """Check the caller's name for a call. Raises FieldError."""
    GENERATE.rows["request_id"].rule.check("request_id", request_id, Bounds({}))


def _bounds(model: worker_pb2.ModelDescription, limits: Limits) -> Bounds:
    values = {
        Bound.VOCABULARY_SIZE: model.vocabulary_size,
        Bound.PROMPT_TOKENS: _max_prompt_tokens(model),
        Bound.OUTPUTS: limits.max_outputs,
        Bound.PROMPT_BYTES: limits.max_prompt_bytes,
        Bound.STOPS: limits.max_stops,
        Bound.LOGIT_BIASES: limits.max_logit_biases,
    }
    settings = dict(_SETTINGS)
    if limits.max_prompt_tokens is not None and limits.max_prompt_tokens < values[Bound.PROMPT_TOKENS]:
        values[Bound.PROMPT_TOKENS] = limits.max_prompt_tokens
        settings[Bound.PROMPT_TOKENS] = "max_prompt_tokens"
    return Bounds(values, model.eos_ids, settings)


def _max_prompt_tokens(model: worker_pb2.ModelDescription) -> int:
    # One is left for the output.
    return model.context_length - 1


def check_encoded_prompt(request: Any, prompt_tokens: int, model: worker_pb2.ModelDescription, limits: Limits) -> None:
    """Check the length of a prompt in tokens, whichever input it came by. Raises FieldError."""
    field = request.WhichOneof("input") or "input"
    check_prompt_length(field, prompt_tokens, _max_prompt_tokens(model))
    check_prompt_tokens(field, prompt_tokens, limits)


def complete_sampling(
    request: gateway_pb2.GenerateRequest, prompt_tokens: int, model: worker_pb2.ModelDescription, limits: Limits
) -> generation_pb2.SamplingParams:
    """Check what depends on the prompt's length, and return the sampling parameters with ``max_tokens`` set."""
    outputs = num_outputs(request)
    check_encoded_prompt(request, prompt_tokens, model, limits)
    sampling = generation_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    if not sampling.HasField("max_tokens"):
        sampling.max_tokens = _default_max_tokens(outputs, model.context_length - prompt_tokens, limits)
    check_lengths(sampling, prompt_tokens, outputs, model.context_length)
    check_output_tokens(outputs, sampling.max_tokens, limits)
    _check_cost(prompt_tokens, outputs, sampling.max_tokens, model.max_call_tokens)
    return sampling


def _default_max_tokens(outputs: int, room: int, limits: Limits) -> int:
    most = min(limits.default_max_tokens, room)
    if limits.max_output_tokens is None:
        return most
    # One at least: more outputs than tokens are allowed are refused by that limit's name.
    return max(1, min(most, limits.max_output_tokens // outputs))


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
