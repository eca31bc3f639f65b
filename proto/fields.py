"""The rules of the messages' fields, as tables that both hops check against.

Pure functions over messages, without settings: the gateway checks what a client sent, and the worker checks again what
a gateway sent. Each raises FieldError at the first rule broken. Lengths come before contents, so that nothing here
takes longer than reading the message did.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2

INVALID_ARGUMENT: int = grpc.StatusCode.INVALID_ARGUMENT.value[0]
UNIMPLEMENTED: int = grpc.StatusCode.UNIMPLEMENTED.value[0]

MAX_NAME_BYTES = 128
"""For tenants, request ids and salts."""
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_LOGPROBS = 1 << 18
"""Log-probabilities of one call, so that an answer that nobody reads yet takes a few megabytes and fits a message."""
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
    NumberRule("min_p", 0, 1),
    NumberRule("max_tokens", 1, MAX_INT64),
    NumberRule("min_tokens", 0, MAX_INT64),
    NumberRule("repetition_penalty", 0.01, 10),
    NumberRule("presence_penalty", -2, 2),
    NumberRule("frequency_penalty", -2, 2),
    NumberRule("logprobs", 0, 20),
    NumberRule("prompt_logprobs", 0, 20),
)
"""Numbers of SamplingParams; ``seed`` takes any value."""

CACHE_UNSERVED = ("ttl_seconds",)
"""Of GenerateRequest and Submit."""

_RETENTION = NumberRule("retention", 0, 100)
_PRIORITY = NumberRule("priority", -100, 100)
_BIAS = NumberRule("logit_bias", -100, 100)
_TIME_LIMIT = NumberRule("time_limit_ms", 1, MAX_INT64)
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


def check_sampling(sampling: generation_pb2.SamplingParams, vocabulary_size: int, eos_ids: Collection[int]) -> None:
    """Check all of SamplingParams but what depends on the prompt's length."""
    for rule in SAMPLING_NUMBERS:
        if sampling.HasField(rule.name):
            check_number(rule, getattr(sampling, rule.name), "sampling.")
    for name, most in (("stop_ids", MAX_STOP_IDS), ("allowed_ids", vocabulary_size), ("banned_ids", vocabulary_size)):
        ids = getattr(sampling, name)
        if len(ids) > most:
            raise invalid(f"sampling.{name}", f"{len(ids)} ids; must be at most {most}")
        check_ids(f"sampling.{name}", ids, vocabulary_size)
    _check_biases(sampling.logit_bias, vocabulary_size)
    _check_choice(sampling, vocabulary_size, eos_ids)


def _check_biases(biases: Mapping[int, float], vocabulary_size: int) -> None:
    if len(biases) > MAX_BIASES:
        raise invalid("sampling.logit_bias", f"{len(biases)} ids; must be at most {MAX_BIASES}")
    check_ids("sampling.logit_bias", biases.keys(), vocabulary_size)
    for token_id, bias in biases.items():
        if not _BIAS.allows(bias):
            raise invalid(
                "sampling.logit_bias", f"{bias} for token id {token_id} is out of range; must be {_BIAS.bounds}"
            )


def _check_choice(sampling: generation_pb2.SamplingParams, vocabulary_size: int, eos_ids: Collection[int]) -> None:
    """Check that a token is left to sample, also while none may end the output."""
    allowed, excluded = set(sampling.allowed_ids), set(sampling.banned_ids)
    if sampling.min_tokens:
        excluded.update(sampling.stop_ids, () if sampling.ignore_eos else eos_ids)
    if not (allowed - excluded if allowed else vocabulary_size - len(excluded)):
        raise invalid(
            f"sampling.{'allowed' if allowed else 'banned'}_ids",
            "leave no token to sample: every one is not allowed, or banned, or would end the output before min_tokens",
        )


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


def check_lengths(
    sampling: generation_pb2.SamplingParams, prompt_tokens: int, outputs: int, context_length: int
) -> None:
    """Check what depends on the lengths of prompt and outputs; ``max_tokens`` is set."""
    room, most = context_length - prompt_tokens, sampling.max_tokens
    if most > room:
        raise invalid(
            "sampling.max_tokens",
            f"{most} is out of range; must be at most {room}, what a prompt of {prompt_tokens} tokens leaves of the "
            f"context of {context_length}",
        )
    if sampling.min_tokens > most:
        raise invalid(
            "sampling.min_tokens", f"{sampling.min_tokens} is out of range; must be at most max_tokens, {most}"
        )
    of_prompt = prompt_tokens * (sampling.prompt_logprobs + 1) if sampling.HasField("prompt_logprobs") else 0
    of_outputs = outputs * most * (sampling.logprobs + 1) if sampling.HasField("logprobs") else 0
    if of_prompt + of_outputs > MAX_LOGPROBS:
        raise invalid(
            f"sampling.{'prompt_' if of_prompt > of_outputs else ''}logprobs",
            f"the call asks for {of_prompt} log-probabilities of {prompt_tokens} prompt tokens and {of_outputs} of "
            f"{outputs} outputs of up to {most} tokens; a call can have at most {MAX_LOGPROBS}",
        )


def check_time_limit(message: gateway_pb2.GenerateRequest | worker_pb2.Submit) -> None:
    """Check ``time_limit_ms``."""
    if message.HasField("time_limit_ms"):
        check_number(_TIME_LIMIT, message.time_limit_ms)


def check_priority(message: gateway_pb2.GenerateRequest | worker_pb2.Submit) -> None:
    """Check ``priority``."""
    if message.HasField("priority"):
        check_number(_PRIORITY, message.priority)


def check_submit(
    submit: worker_pb2.Submit,
    *,
    vocabulary_size: int,
    eos_ids: Collection[int],
    context_length: int,
    max_outputs: int,
) -> None:
    """Check a call as it reaches the worker. Raises FieldError; whether the pool can hold it is not asked here."""
    check_text("tenant", submit.tenant, low=1)
    check_text("request_id", submit.request_id)
    check_prompt_length("token_ids", len(submit.token_ids), context_length)
    check_ids("token_ids", submit.token_ids, vocabulary_size)
    check_number(NumberRule("n", 1, max_outputs), submit.n)
    if not submit.sampling.HasField("max_tokens"):
        raise invalid("sampling.max_tokens", "is not set; the gateway must set it")
    check_sampling(submit.sampling, vocabulary_size, eos_ids)
    check_lengths(submit.sampling, len(submit.token_ids), submit.n, context_length)
    check_cache(submit.cache)
    check_time_limit(submit)
    check_priority(submit)
    if submit.HasField("deadline_seconds"):
        check_number(_DEADLINE, submit.deadline_seconds)
