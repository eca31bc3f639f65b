"""The rules of the messages' fields, as tables that both hops check against.

Pure functions over messages, without settings: the gateway checks what a client sent, and the worker checks again what
a gateway sent. Each raises FieldError at the first rule broken. Lengths come before contents, so that nothing here
takes longer than reading the message did.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from prefixgate.proto import generation_pb2, worker_pb2

INVALID_ARGUMENT: int = grpc.StatusCode.INVALID_ARGUMENT.value[0]
UNIMPLEMENTED: int = grpc.StatusCode.UNIMPLEMENTED.value[0]

MAX_NAME_BYTES = 128
"""For tenants, request ids and salts."""
MAX_STOP_IDS = 64
MAX_INT64 = (1 << 63) - 1
_SHOWN_CHARACTERS = 64


@dataclass(eq=False)
class FieldError(Exception):
    """A field breaks a rule. ``message`` names the field, the value and the bound, and can be shown to the client."""

    code: int
    """A gRPC status code: INVALID_ARGUMENT, or UNIMPLEMENTED for a field that is not served yet."""
    field: str
    """Path of the field, such as ``sampling.top_p``."""
    message: str

    def __str__(self) -> str:
        return self.message


class NumberRule(NamedTuple):
    """The range of an optional number; NaN and the infinities are in none."""

    name: str
    low: float
    high: float
    above_low: bool = False
    """Whether ``low`` itself is already outside."""

    @property
    def bounds(self) -> str:
        """The range as a phrase that follows "must be"."""
        if self.high == MAX_INT64:
            return f"at least {self.low:g}"
        if math.isinf(self.high):
            return f"greater than {self.low:g} and finite"
        return f"in {'(' if self.above_low else '['}{self.low:g}, {self.high:g}]"

    def allows(self, value: float) -> bool:
        """Tell whether a value is in the range."""
        # Written so that NaN, which fails every comparison, is refused.
        above = value > self.low if self.above_low else value >= self.low
        return above and value <= self.high and math.isfinite(value)


SAMPLING_NUMBERS = (
    NumberRule("temperature", 0, 100),
    NumberRule("top_k", 1, MAX_INT64),
    NumberRule("top_p", 0, 1, above_low=True),
    NumberRule("max_tokens", 1, MAX_INT64),
)
"""Numbers of SamplingParams that are served. ``seed`` takes any value."""

SAMPLING_UNSERVED = (
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_ids",
    "banned_ids",
    "logprobs",
    "prompt_logprobs",
)
CACHE_UNSERVED = ("ttl_seconds",)
CALL_UNSERVED = ("priority", "time_limit_ms")
"""Of GenerateRequest and Submit."""

_RETENTION = NumberRule("retention", 0, 100)
_DEADLINE = NumberRule("deadline_seconds", 0, math.inf, above_low=True)


def invalid(field: str, message: str) -> FieldError:
    """Make the error of a field whose value breaks a rule; ``message`` goes on after the field's name."""
    return FieldError(INVALID_ARGUMENT, field, f"{field}: {message}")


def shown(text: str) -> str:
    """Quote a client's text for a message: printable, and short however long it is."""
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return ascii(cut) if not cut.isprintable() else repr(cut)


def check_number(rule: NumberRule, value: float, path: str = "") -> None:
    """Check a number against its range."""
    if not rule.allows(value):
        raise invalid(path + rule.name, f"{value} is out of range; must be {rule.bounds}")


def check_text(field: str, text: str, *, low: int = 0, high: int = MAX_NAME_BYTES) -> None:
    """Check the length of a text, in bytes of UTF-8."""
    # A character has at least one byte, so that a huge text is refused before it is encoded.
    size = len(text) if len(text) > high else len(text.encode())
    if size < low:
        raise invalid(field, f"is {size} bytes long; must be at least {low}")
    if size > high:
        raise invalid(field, f"is at least {size} bytes long; must be at most {high}")


def check_ids(field: str, ids: Collection[int], vocabulary_size: int) -> None:
    """Check that all token ids are inside the vocabulary. Ids are unsigned on the wire, so that none is negative."""
    if ids and (worst := max(ids)) >= vocabulary_size:
        raise invalid(field, f"token id {worst} is outside the vocabulary; must be below {vocabulary_size}")


def check_unserved(message: Any, names: Collection[str], path: str = "") -> None:
    """Refuse fields that are not served yet when they are set to anything, zero included."""
    set_fields = {descriptor.name for descriptor, _ in message.ListFields()}
    for name in names:
        if name in set_fields:
            raise FieldError(UNIMPLEMENTED, path + name, f"{path}{name}: not served yet; leave it unset")


def check_sampling(sampling: generation_pb2.SamplingParams, vocabulary_size: int) -> None:
    """Check all of SamplingParams but how ``max_tokens`` stands to the context."""
    check_unserved(sampling, SAMPLING_UNSERVED, "sampling.")
    for rule in SAMPLING_NUMBERS:
        if sampling.HasField(rule.name):
            check_number(rule, getattr(sampling, rule.name), "sampling.")
    if len(sampling.stop_ids) > MAX_STOP_IDS:
        raise invalid("sampling.stop_ids", f"{len(sampling.stop_ids)} ids; must be at most {MAX_STOP_IDS}")
    check_ids("sampling.stop_ids", sampling.stop_ids, vocabulary_size)


def check_cache(cache: generation_pb2.CacheControl) -> None:
    """Check all of CacheControl."""
    check_unserved(cache, CACHE_UNSERVED, "cache.")
    if cache.mode not in generation_pb2.CacheMode.values():
        raise invalid("cache.mode", f"{cache.mode} is no CacheMode")
    if cache.HasField("retention"):
        check_number(_RETENTION, cache.retention, "cache.")
    check_text("cache.salt", cache.salt)


def check_prompt_length(field: str, prompt_tokens: int, context_length: int) -> None:
    """Check that a prompt has a token and leaves room in the context for one more."""
    if prompt_tokens < 1:
        raise invalid(field, "comes to 0 tokens; must be at least 1")
    if prompt_tokens >= context_length:
        raise invalid(
            field,
            f"comes to {prompt_tokens} tokens; must be at most {context_length - 1}, as the context holds "
            f"{context_length} and one must be left for the output",
        )


def check_max_tokens(max_tokens: int, prompt_tokens: int, context_length: int) -> None:
    """Check that prompt and output fit the context together."""
    if max_tokens > context_length - prompt_tokens:
        raise invalid(
            "sampling.max_tokens",
            f"{max_tokens} is out of range; must be at most {context_length - prompt_tokens}, what a prompt of "
            f"{prompt_tokens} tokens leaves of the context of {context_length}",
        )


def check_submit(submit: worker_pb2.Submit, *, vocabulary_size: int, context_length: int, max_outputs: int) -> None:
    """Check a call as it reaches the worker. Raises FieldError; whether the pool can hold it is not asked here."""
    check_unserved(submit, CALL_UNSERVED)
    check_text("tenant", submit.tenant, low=1)
    check_text("request_id", submit.request_id)
    check_prompt_length("token_ids", len(submit.token_ids), context_length)
    check_ids("token_ids", submit.token_ids, vocabulary_size)
    check_number(NumberRule("n", 1, max_outputs), submit.n)
    if not submit.sampling.HasField("max_tokens"):
        raise invalid("sampling.max_tokens", "is not set; the gateway must set it")
    check_sampling(submit.sampling, vocabulary_size)
    check_max_tokens(submit.sampling.max_tokens, len(submit.token_ids), context_length)
    check_cache(submit.cache)
    if submit.HasField("deadline_seconds"):
        check_number(_DEADLINE, submit.deadline_seconds)
