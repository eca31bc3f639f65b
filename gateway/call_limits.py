"""What a single call may ask for: the operator's bounds for all tenants and for one, whichever is less."""

from dataclasses import dataclass, fields
from typing import Any

from prefixgate.config.limit_settings import MAX_LOGIT_BIASES, MAX_STOPS, LimitSettings
from prefixgate.proto.fields import INVALID_ARGUMENT, FieldError

_MAX_CHARACTER_BYTES = 4
"""Of UTF-8."""


class LimitError(FieldError):
    """A field is over a bound that the operator set."""

    def __init__(self, limit: str, field: str, message: str) -> None:
        """``limit`` is the setting's name; ``message`` goes on after the field's."""
        super().__init__(INVALID_ARGUMENT, field, f"{field}: {message} (limits.{limit})")
        self.limit = limit


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


def check_limits(request: Any, limits: Limits) -> None:
    """Check a request of any method, before its prompt is encoded. Raises LimitError."""
    known = request.DESCRIPTOR.fields_by_name
    if "n" in known and request.n > limits.max_outputs:
        raise LimitError("max_outputs", "n", f"{request.n} outputs; must be at most {limits.max_outputs}")
    if "stop" in known and len(request.stop) > limits.max_stops:
        raise LimitError("max_stops", "stop", f"{len(request.stop)} strings; must be at most {limits.max_stops}")
    if "sampling" in known and len(request.sampling.logit_bias) > limits.max_logit_biases:
        raise LimitError(
            "max_logit_biases",
            "sampling.logit_bias",
            f"{len(request.sampling.logit_bias)} ids; must be at most {limits.max_logit_biases}",
        )
    if "prompt" in known:
        _check_text(request, limits.max_prompt_bytes)


def _check_text(request: Any, most: int) -> None:
    field = request.WhichOneof("input")
    if field == "prompt":
        texts = [request.prompt]
    elif field == "chat":
        texts = [message.content for message in request.chat.messages]
    else:
        return
    if _MAX_CHARACTER_BYTES * sum(map(len, texts)) <= most:
        return  # by far most calls, which need not be encoded to be counted
    size = sum(len(text.encode()) for text in texts)
    if size > most:
        raise LimitError("max_prompt_bytes", field, f"{size} bytes of text; must be at most {most}")


def check_prompt_tokens(field: str, prompt_tokens: int, limits: Limits) -> None:
    """Check the length of an encoded prompt. Raises LimitError."""
    most = limits.max_prompt_tokens
    if most is not None and prompt_tokens > most:
        raise LimitError("max_prompt_tokens", field, f"comes to {prompt_tokens} tokens; must be at most {most}")


def check_output_tokens(outputs: int, max_tokens: int, limits: Limits) -> None:
    """Check how much a call may generate. Raises LimitError."""
    most = limits.max_output_tokens
    if most is not None and outputs * max_tokens > most:
        raise LimitError(
            "max_output_tokens",
            "sampling.max_tokens",
            f"{outputs} outputs of {max_tokens} tokens are {outputs * max_tokens}; must be at most {most} together",
        )
