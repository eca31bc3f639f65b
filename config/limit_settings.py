"""Limits: what calls may ask for, all tenants together and each by itself."""

from dataclasses import dataclass, fields, replace

from prefixgate.config.kinds import Integer, Size
from prefixgate.config.setting import setting

MAX_MESSAGE_BYTES = 64 << 20
"""Of both hops and both ways; what clients may send can be bounded to less."""

MAX_STOPS = 16
MAX_LOGIT_BIASES = 1024
"""The most of each that any configuration allows; the fields' own rules refuse more."""

_PER_MINUTE = Integer(1, 1 << 40)
_TOKENS = Integer(1, 1 << 31)


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What calls may ask for. Where both this and a tenant's own limits say something, both hold.

    The first three are what all tenants together may use; the others bound every single call. A call over one of the
    first three is refused with RESOURCE_EXHAUSTED and the time to try again, one over another with INVALID_ARGUMENT.
    """

    requests_per_minute: int | None = setting(
        None,
        _PER_MINUTE,
        "Calls per minute, of every method but health. As many may come at once after a quiet minute.",
        unit="calls",
    )
    tokens_per_minute: int | None = setting(
        None,
        _PER_MINUTE,
        "Tokens per minute: prompt tokens that the cache did not have, and generated ones. A call is charged its whole "
        "prompt and its longest outputs when it begins, and gets back at its end what it did not use.",
        unit="tokens",
    )
    max_concurrent_calls: int | None = setting(
        4096,
        Integer(1, 1 << 20),
        "Calls at the same time: 4096 of all tenants together, and 1024 of each, where nothing else is set. Of one "
        "connection 1024 are taken at the same time, and others wait at their client.",
        unit="calls",
    )
    # Ids travel to the worker in up to 4 bytes each, at most one for each byte of text, in one message of 64 MiB.
    max_prompt_bytes: int | None = setting(4 << 20, Size(1, 15 << 20), "Longest prompt text of a call.", unit="bytes")
    max_prompt_tokens: int | None = setting(
        None, _TOKENS, "Longest prompt of a call; the model's context bounds it anyway.", unit="tokens"
    )
    max_outputs: int | None = setting(
        16, Integer(1, 128), "Most outputs (n) that one call may ask for.", unit="outputs"
    )
    max_output_tokens: int | None = setting(
        None, _TOKENS, "Most tokens that one call may ask for: n times max_tokens.", unit="tokens"
    )
    max_stops: int | None = setting(MAX_STOPS, Integer(0, MAX_STOPS), "Most stop strings of a call.", unit="strings")
    max_logit_biases: int | None = setting(
        MAX_LOGIT_BIASES, Integer(0, MAX_LOGIT_BIASES), "Most entries of a call's logit_bias.", unit="entries"
    )


NO_LIMITS = LimitSettings(**{entry.name: None for entry in fields(LimitSettings)})
"""No bound at all."""

TENANT_LIMITS = replace(NO_LIMITS, max_concurrent_calls=1024)
"""Of a tenant that has none of its own. A quarter of what all may have at once, so that one who floods the gateway
leaves room for others, and memory for everybody."""
