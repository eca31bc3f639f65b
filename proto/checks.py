"""Checks that need more than the table of fields: the length of the encoded prompt, and all of a submit.

Pure functions over messages; each raises FieldError at the first rule broken.
"""

from collections.abc import Collection

from prefixgate.proto import generation_pb2, worker_pb2
from prefixgate.proto.field_table import SUBMIT
from prefixgate.proto.fields import Bound, Bounds, invalid

MAX_LOGPROBS = 1 << 18
"""Log-probabilities of one call, so that an answer that nobody reads yet takes a few megabytes and fits a message."""
MAX_LOGIT_BIASES = 1024
"""Entries of one call, whatever its gateway allows."""


def check_prompt_length(field: str, prompt_tokens: int, most: int) -> None:
    """Check that an encoded prompt has a token and at most so many."""
    if prompt_tokens < 1:
        raise invalid(field, "comes to 0 tokens; must be at least 1")
    if prompt_tokens > most:
        raise invalid(field, f"comes to {prompt_tokens} tokens; must be at most {most}")


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


def check_submit(
    submit: worker_pb2.Submit,
    *,
    vocabulary_size: int,
    eos_ids: Collection[int],
    context_length: int,
    max_outputs: int,
) -> None:
    """Check a call as it reaches the worker. Raises FieldError; whether the pool can hold it is not asked here."""
    values = {
        Bound.VOCABULARY_SIZE: vocabulary_size,
        Bound.PROMPT_TOKENS: context_length - 1,
        Bound.OUTPUTS: max_outputs,
        Bound.LOGIT_BIASES: MAX_LOGIT_BIASES,
    }
    SUBMIT.check("", submit, Bounds(values, eos_ids))
    if not submit.sampling.HasField("max_tokens"):
        raise invalid("sampling.max_tokens", "is not set; the gateway must set it")
    check_lengths(submit.sampling, len(submit.token_ids), submit.n, context_length)
