"""What a single call may ask for: the operator's bounds for all tenants and for one, whichever is less."""

from dataclasses import dataclass, fields
from typing import Any

from prefixgate.config.limit_settings import MAX_LOGIT_BIASES, MAX_STOPS, LimitSettings
from prefixgate.proto.fields import invalid


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one call; None where there is none. The defaults are the settings'."""

    default_max_tokens: int = 256
    max_outputs: int = 16
    max_prompt_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_stops: int = MAX_STOPS
    max_logit_biases: int = MAX_LOGIT_BIASES


def limits_of(default_max_tokens: int, shared: LimitSettings, own: LimitSettings) -> Limits:
    """Lay a tenant's own limits over those of all."""

    def least(name: str) -> Any:
        values = [value for value in (getattr(shared, name), getattr(own, name)) if value is not None]
        return min(values, default=None)

    return Limits(default_max_tokens, **{entry.name: least(entry.name) for entry in fields(Limits)[1:]})


def check_prompt_tokens(field: str, prompt_tokens: int, limits: Limits) -> None:
    """Check the length of an encoded prompt. Raises FieldError."""
    most = limits.max_prompt_tokens
    if most is not None and prompt_tokens > most:
        raise invalid(field, f"comes to {prompt_tokens} tokens; must be at most {most}", "max_prompt_tokens")


def check_output_tokens(outputs: int, max_tokens: int, limits: Limits) -> None:
    """Check how much a call may generate. Raises FieldError."""
    most = limits.max_output_tokens
    if most is not None and outputs * max_tokens > most:
        raise invalid(
            "sampling.max_tokens",
            f"{outputs} outputs of {max_tokens} tokens are {outputs * max_tokens}; must be at most {most} together",
            "max_output_tokens",
        )
