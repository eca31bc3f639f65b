from dataclasses import replace

import pytest

from prefixgate.config.limit_settings import NO_LIMITS, LimitSettings
from prefixgate.gateway.call_limits import (
    Limits,
    check_output_tokens,
    check_prompt_tokens,
    limits_of,
)
from prefixgate.proto.fields import FieldError

LIMITS = Limits(
    max_outputs=2,
    max_prompt_bytes=10,
    max_prompt_tokens=5,
    max_output_tokens=20,
    max_stops=1,
    max_logit_biases=1,
)


def test_lengths_in_tokens_are_bounded_where_they_are_known() -> None:
    check_prompt_tokens("prompt", 5, LIMITS)
    check_output_tokens(2, 10, LIMITS)
    with pytest.raises(FieldError, match="prompt: comes to 6 tokens; must be at most 5"):
        check_prompt_tokens("prompt", 6, LIMITS)
    with pytest.raises(FieldError, match="2 outputs of 11 tokens are 22; must be at most 20 together"):
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
