from dataclasses import replace
from typing import Any

import pytest

from prefixgate.config.limit_settings import NO_LIMITS, LimitSettings
from prefixgate.gateway.call_limits import (
    LimitError,
    Limits,
    check_limits,
    check_output_tokens,
    check_prompt_tokens,
    limits_of,
)
from prefixgate.proto import gateway_pb2, generation_pb2
from prefixgate.proto.fields import INVALID_ARGUMENT

LIMITS = Limits(
    max_outputs=2,
    max_prompt_bytes=10,
    max_prompt_tokens=5,
    max_output_tokens=20,
    max_stops=1,
    max_logit_biases=1,
)


def chat(*contents: str) -> gateway_pb2.Chat:
    return gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content=content) for content in contents])


def biases(count: int) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(logit_bias=dict.fromkeys(range(count), 1.0))


@pytest.mark.parametrize(
    ("fields", "limit", "message"),
    [
        ({"n": 3}, "max_outputs", "n: 3 outputs; must be at most 2 (limits.max_outputs)"),
        ({"stop": ["a", "b"]}, "max_stops", "stop: 2 strings; must be at most 1 (limits.max_stops)"),
        (
            {"sampling": biases(2)},
            "max_logit_biases",
            "sampling.logit_bias: 2 ids; must be at most 1 (limits.max_logit_biases)",
        ),
        (
            {"prompt": "x" * 11},
            "max_prompt_bytes",
            "prompt: 11 bytes of text; must be at most 10 (limits.max_prompt_bytes)",
        ),
        ({"prompt": "é" * 6}, "max_prompt_bytes", "prompt: 12 bytes of text; must be at most 10"),
        ({"chat": chat("x" * 6, "é" * 3)}, "max_prompt_bytes", "chat: 12 bytes of text; must be at most 10"),
    ],
)
def test_over_a_bound_the_limit_the_value_and_the_bound_are_told(
    fields: dict[str, Any], limit: str, message: str
) -> None:
    with pytest.raises(LimitError) as refusal:
        check_limits(gateway_pb2.GenerateRequest(**fields), LIMITS)
    assert refusal.value.limit == limit
    assert str(refusal.value).startswith(message)
    assert (refusal.value.code, refusal.value.field) == (INVALID_ARGUMENT, message.partition(":")[0])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "stop": ["a"], "sampling": biases(1), "prompt": "é" * 5},
        {"chat": chat("x" * 5, "x" * 5)},
        {"token_ids": gateway_pb2.TokenIds(ids=range(100))},
    ],
)
def test_what_is_within_the_bounds_passes(fields: dict[str, Any]) -> None:
    check_limits(gateway_pb2.GenerateRequest(**fields), LIMITS)


def test_requests_without_these_fields_pass_and_others_are_held_to_those_they_have() -> None:
    check_limits(gateway_pb2.StatsRequest(), LIMITS)
    check_limits(gateway_pb2.TokenizeRequest(prompt="x" * 10), LIMITS)
    with pytest.raises(LimitError, match="max_prompt_bytes"):
        check_limits(gateway_pb2.TokenizeRequest(prompt="x" * 11), LIMITS)


def test_lengths_in_tokens_are_bounded_where_they_are_known() -> None:
    check_prompt_tokens("prompt", 5, LIMITS)
    check_output_tokens(2, 10, LIMITS)
    with pytest.raises(LimitError, match="prompt: comes to 6 tokens; must be at most 5"):
        check_prompt_tokens("prompt", 6, LIMITS)
    with pytest.raises(LimitError, match="2 outputs of 11 tokens are 22; must be at most 20 together"):
        check_output_tokens(2, 11, LIMITS)
    check_prompt_tokens("prompt", 10**9, Limits())
    check_output_tokens(128, 10**9, Limits())


def test_of_two_bounds_the_lower_holds() -> None:
    shared = LimitSettings(max_outputs=8, max_prompt_tokens=100, max_stops=4)
    own = replace(NO_LIMITS, max_outputs=16, max_prompt_tokens=50, max_output_tokens=7)
    limits = limits_of(99, shared, own)
    assert limits == Limits(99, 8, 4 << 20, 50, 7, 4, 1024)


def test_the_defaults_are_the_settings() -> None:
    assert limits_of(256, LimitSettings(), NO_LIMITS) == Limits()
