"""Every rule of the messages' fields, at its bounds."""

import math
from contextlib import nullcontext

import pytest

from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2
from prefixgate.proto.checks import MAX_LOGPROBS, check_submit
from prefixgate.proto.fields import INVALID_ARGUMENT, Bounds, FieldError, Text, shown
from prefixgate.proto.transport import MAX_MESSAGE_BYTES

VOCABULARY = 100
CONTEXT = 32
MAX_OUTPUTS = 4
EOS_IDS = (0, 99)
EVERY_ID = list(range(VOCABULARY))


def make_submit(**fields: object) -> worker_pb2.Submit:
    submit = worker_pb2.Submit(call_id=7, tenant="a", token_ids=[1, 2, 3], n=1)
    submit.sampling.max_tokens = 5
    submit.cache.SetInParent()
    for path, value in fields.items():
        *parents, name = path.split("__")
        target: object = submit
        for parent in parents:
            target = getattr(target, parent)
        if isinstance(value, list):
            getattr(target, name)[:] = value
        elif isinstance(value, dict):
            getattr(target, name).update(value)
        else:
            setattr(target, name, value)
    return submit


def check(submit: worker_pb2.Submit) -> None:
    check_submit(submit, vocabulary_size=VOCABULARY, eos_ids=EOS_IDS, context_length=CONTEXT, max_outputs=MAX_OUTPUTS)


def refusal(submit: worker_pb2.Submit) -> FieldError:
    with pytest.raises(FieldError) as caught:
        check(submit)
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tenant": "t" * 128},
        {"tenant": "a\0b"},
        {"request_id": "r" * 128},
        {"token_ids": [0, VOCABULARY - 1]},
        {"token_ids": [1] * (CONTEXT - 1), "sampling__max_tokens": 1},
        {"sampling__max_tokens": CONTEXT - 3},
        {"sampling__temperature": 0.0},
        {"sampling__temperature": -0.0},
        {"sampling__temperature": 1e-310},
        {"sampling__temperature": 100.0},
        {"sampling__top_k": 1},
        {"sampling__top_k": VOCABULARY + 1},
        {"sampling__top_k": 2**63 - 1},
        {"sampling__top_p": 1e-310},
        {"sampling__top_p": 1.0},
        {"sampling__seed": -(2**63)},
        {"sampling__seed": 2**63 - 1},
        {"sampling__stop_ids": [VOCABULARY - 1] * 64},
        {"sampling__ignore_eos": True},
        {"sampling__min_p": 0.0},
        {"sampling__min_p": -0.0},
        {"sampling__min_p": 1e-310},
        {"sampling__min_p": 1.0},
        {"sampling__min_tokens": 0},
        {"sampling__min_tokens": 5},
        {"sampling__repetition_penalty": 0.01},
        {"sampling__repetition_penalty": 10.0},
        {"sampling__presence_penalty": -2.0},
        {"sampling__presence_penalty": 1e-310},
        {"sampling__frequency_penalty": -0.0},
        {"sampling__frequency_penalty": 2.0},
        {"sampling__logit_bias": {0: -100.0, VOCABULARY - 1: 100.0, 5: -0.0, 6: 1e-310}},
        {"sampling__allowed_ids": [VOCABULARY - 1]},
        {"sampling__allowed_ids": EVERY_ID},
        {"sampling__banned_ids": EVERY_ID[1:]},
        {"sampling__banned_ids": EVERY_ID[2:], "sampling__min_tokens": 1},
        {"sampling__banned_ids": EVERY_ID[1:], "sampling__min_tokens": 1, "sampling__ignore_eos": True},
        {"sampling__allowed_ids": [0], "sampling__ignore_eos": True, "sampling__min_tokens": 1},
        {"sampling__logprobs": 0},
        {"sampling__logprobs": 20},
        {"sampling__prompt_logprobs": 0},
        {"sampling__prompt_logprobs": 20},
        {"time_limit_ms": 1},
        {"time_limit_ms": 2**63 - 1},
        {"n": MAX_OUTPUTS},
        {"cache__mode": generation_pb2.CACHE_MODE_UNSPECIFIED},
        {"cache__mode": generation_pb2.CACHE_MODE_DEFAULT},
        {"cache__mode": generation_pb2.CACHE_MODE_READ_ONLY},
        {"cache__mode": generation_pb2.CACHE_MODE_BYPASS},
        {"cache__retention": 0},
        {"cache__ttl_seconds": 1e-310},
        {"cache__ttl_seconds": 86_400.0, "cache__mode": generation_pb2.CACHE_MODE_DEFAULT},
        {"prefill_only": True, "n": 1, "sampling__max_tokens": 1},
        {"priority": -100},
        {"priority": 100},
        {"cache__retention": 100},
        {"cache__salt": "é" * 64},
        {"deadline_seconds": 1e-9},
    ],
)
def test_takes_what_is_inside_the_bounds(fields: dict[str, object]) -> None:
    check(make_submit(**fields))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": "t" * 129}, "tenant"),
        ({"request_id": "r" * 129}, "request_id"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [VOCABULARY]}, "token_ids"),
        ({"token_ids": [1, 2**31]}, "token_ids"),
        ({"token_ids": [2**32 - 1, 1]}, "token_ids"),
        ({"token_ids": [1] * CONTEXT}, "token_ids"),
        ({"token_ids": [1] * (CONTEXT - 1)}, "sampling.max_tokens"),
        ({"sampling__max_tokens": 0}, "sampling.max_tokens"),
        ({"sampling__max_tokens": -1}, "sampling.max_tokens"),
        ({"sampling__max_tokens": CONTEXT - 2}, "sampling.max_tokens"),
        ({"sampling__max_tokens": 2**31}, "sampling.max_tokens"),
        ({"sampling__temperature": -1e-9}, "sampling.temperature"),
        ({"sampling__temperature": 100.1}, "sampling.temperature"),
        ({"sampling__temperature": 1e308}, "sampling.temperature"),
        ({"sampling__top_k": 0}, "sampling.top_k"),
        ({"sampling__top_k": -1}, "sampling.top_k"),
        ({"sampling__top_p": 0.0}, "sampling.top_p"),
        ({"sampling__top_p": -0.0}, "sampling.top_p"),
        ({"sampling__top_p": 1.0001}, "sampling.top_p"),
        ({"sampling__top_p": -0.1}, "sampling.top_p"),
        ({"sampling__stop_ids": [VOCABULARY]}, "sampling.stop_ids"),
        ({"sampling__stop_ids": [1] * 65}, "sampling.stop_ids"),
        ({"sampling__min_p": -1e-9}, "sampling.min_p"),
        ({"sampling__min_p": 1.1}, "sampling.min_p"),
        ({"sampling__min_tokens": -1}, "sampling.min_tokens"),
        ({"sampling__min_tokens": 6}, "sampling.min_tokens"),
        ({"sampling__min_tokens": 2**63 - 1}, "sampling.min_tokens"),
        ({"sampling__repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"sampling__repetition_penalty": -1.0}, "sampling.repetition_penalty"),
        ({"sampling__repetition_penalty": 1e-310}, "sampling.repetition_penalty"),
        ({"sampling__repetition_penalty": 10.1}, "sampling.repetition_penalty"),
        ({"sampling__presence_penalty": 2.1}, "sampling.presence_penalty"),
        ({"sampling__frequency_penalty": -2.1}, "sampling.frequency_penalty"),
        ({"sampling__logit_bias": {VOCABULARY: 1.0}}, "sampling.logit_bias"),
        ({"sampling__logit_bias": {2**32 - 1: 1.0}}, "sampling.logit_bias"),
        ({"sampling__logit_bias": {1: 100.1}}, "sampling.logit_bias[1]"),
        ({"sampling__logit_bias": {1: math.nan}}, "sampling.logit_bias[1]"),
        ({"sampling__logit_bias": {1: -math.inf}}, "sampling.logit_bias[1]"),
        ({"sampling__logit_bias": dict.fromkeys(range(100_000), 1.0)}, "sampling.logit_bias"),
        ({"sampling__allowed_ids": [VOCABULARY]}, "sampling.allowed_ids"),
        ({"sampling__allowed_ids": [1] * (VOCABULARY + 1)}, "sampling.allowed_ids"),
        ({"sampling__allowed_ids": [5, 7], "sampling__banned_ids": [7, 5]}, "sampling.allowed_ids"),
        ({"sampling__allowed_ids": [0, 99], "sampling__min_tokens": 1}, "sampling.allowed_ids"),
        (
            {"sampling__allowed_ids": [0, 7], "sampling__stop_ids": [7], "sampling__min_tokens": 1},
            "sampling.allowed_ids",
        ),
        ({"sampling__banned_ids": [2**32 - 1]}, "sampling.banned_ids"),
        ({"sampling__banned_ids": [1] * 1_000_000}, "sampling.banned_ids"),
        ({"sampling__banned_ids": EVERY_ID}, "sampling.banned_ids"),
        ({"sampling__banned_ids": EVERY_ID[1:], "sampling__min_tokens": 1}, "sampling.banned_ids"),
        ({"sampling__logprobs": -1}, "sampling.logprobs"),
        ({"sampling__logprobs": 21}, "sampling.logprobs"),
        ({"sampling__logprobs": 10**6}, "sampling.logprobs"),
        ({"sampling__prompt_logprobs": -1}, "sampling.prompt_logprobs"),
        ({"sampling__prompt_logprobs": 21}, "sampling.prompt_logprobs"),
        ({"time_limit_ms": 0}, "time_limit_ms"),
        ({"time_limit_ms": -1}, "time_limit_ms"),
        ({"n": 0}, "n"),
        ({"n": MAX_OUTPUTS + 1}, "n"),
        ({"n": 2**32 - 1}, "n"),
        ({"cache__mode": 17}, "cache.mode"),
        ({"cache__mode": -1}, "cache.mode"),
        ({"cache__retention": -1}, "cache.retention"),
        ({"priority": -101}, "priority"),
        ({"priority": 101}, "priority"),
        ({"cache__retention": 101}, "cache.retention"),
        ({"cache__retention": 2**63 - 1}, "cache.retention"),
        ({"cache__salt": "s" * 129}, "cache.salt"),
        ({"cache__salt": "é" * 65}, "cache.salt"),
        ({"deadline_seconds": 0.0}, "deadline_seconds"),
        ({"deadline_seconds": -1.0}, "deadline_seconds"),
    ],
)
def test_refuses_what_is_outside_and_names_the_field(fields: dict[str, object], field: str) -> None:
    error = refusal(make_submit(**fields))
    assert (error.code, error.field) == (INVALID_ARGUMENT, field)
    assert str(error).startswith(f"{field}: ")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "path",
    [
        "sampling__temperature",
        "sampling__top_p",
        "sampling__min_p",
        "sampling__repetition_penalty",
        "sampling__presence_penalty",
        "sampling__frequency_penalty",
        "deadline_seconds",
    ],
)
def test_no_float_may_be_other_than_finite(path: str, value: float) -> None:
    error = refusal(make_submit(**{path: value}))
    assert (error.code, error.field) == (INVALID_ARGUMENT, path.replace("__", "."))
    assert str(error).isascii()


def test_max_tokens_must_be_set() -> None:
    submit = make_submit()
    submit.sampling.ClearField("max_tokens")
    assert refusal(submit).field == "sampling.max_tokens"


def test_messages_about_long_values_are_short() -> None:
    with pytest.raises(FieldError) as caught:
        Text().check("salt", "x" * 1_000_000, Bounds({}))
    assert len(str(caught.value)) < 200
    assert len(shown("é" * 1_000_000)) < 100
    assert shown("a\0b") == "'a\\x00b'"


def test_a_million_ids_are_refused_by_length_first() -> None:
    error = refusal(make_submit(token_ids=[2**32 - 1] * 1_200_000))
    assert "1200000 ids" in str(error)


@pytest.mark.parametrize(
    ("prompt", "fields", "field"),
    [
        (262_144, {"sampling__prompt_logprobs": 0}, ""),
        (262_145, {"sampling__prompt_logprobs": 0}, "sampling.prompt_logprobs"),
        (12_484, {"sampling__prompt_logprobs": 20}, "sampling.prompt_logprobs"),
        (12_483, {"sampling__prompt_logprobs": 20, "sampling__logprobs": 0, "n": 1}, ""),
        (12_483, {"sampling__prompt_logprobs": 20, "sampling__logprobs": 0, "n": 2}, "sampling.prompt_logprobs"),
        (1, {"sampling__logprobs": 20, "sampling__max_tokens": 3120, "n": 4}, ""),
        (1, {"sampling__logprobs": 20, "sampling__max_tokens": 3121, "n": 4}, "sampling.logprobs"),
        (1_000_000, {}, ""),
    ],
)
def test_what_a_call_may_ask_of_log_probabilities_is_bounded(
    prompt: int, fields: dict[str, object], field: str
) -> None:
    submit = make_submit(**({"token_ids": [1] * prompt, "sampling__max_tokens": 1} | fields))
    with pytest.raises(FieldError) if field else nullcontext() as caught:
        check_submit(submit, vocabulary_size=VOCABULARY, eos_ids=EOS_IDS, context_length=2**20, max_outputs=MAX_OUTPUTS)
    if caught is not None:
        assert (caught.value.code, caught.value.field) == (INVALID_ARGUMENT, field)
        assert "at most 262144" in str(caught.value)


@pytest.mark.parametrize("top", [0, 20])
def test_the_most_log_probabilities_that_a_call_may_ask_for_fit_a_message(top: int) -> None:
    largest = generation_pb2.TokenLogprob(token_id=2**32 - 1, logprob=-1.5, rank=2**32 - 1)
    for _ in range(top):
        largest.top.add(token_id=2**32 - 1, logprob=-1.5)
    tokens = MAX_LOGPROBS // (top + 1)
    each = gateway_pb2.GenerateResponse(prompt_logprobs=[largest]).ByteSize()
    # Ids and text of as many tokens come with them: five bytes of an id, and more text than a token is ever long.
    assert tokens * (each + 5 + 64) < MAX_MESSAGE_BYTES
