"""Every rule of the messages' fields, at its bounds."""

import math
from collections.abc import Callable

import pytest

from prefixgate.proto import generation_pb2, worker_pb2
from prefixgate.proto.fields import (
    INVALID_ARGUMENT,
    UNIMPLEMENTED,
    FieldError,
    check_submit,
    check_text,
    shown,
)

VOCABULARY = 100
CONTEXT = 32
MAX_OUTPUTS = 4


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
        else:
            setattr(target, name, value)
    return submit


def check(submit: worker_pb2.Submit) -> None:
    check_submit(submit, vocabulary_size=VOCABULARY, context_length=CONTEXT, max_outputs=MAX_OUTPUTS)


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
        {"n": MAX_OUTPUTS},
        {"cache__mode": generation_pb2.CACHE_MODE_UNSPECIFIED},
        {"cache__mode": generation_pb2.CACHE_MODE_DEFAULT},
        {"cache__mode": generation_pb2.CACHE_MODE_READ_ONLY},
        {"cache__mode": generation_pb2.CACHE_MODE_BYPASS},
        {"cache__retention": 0},
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
        ({"n": 0}, "n"),
        ({"n": MAX_OUTPUTS + 1}, "n"),
        ({"n": 2**32 - 1}, "n"),
        ({"cache__mode": 17}, "cache.mode"),
        ({"cache__mode": -1}, "cache.mode"),
        ({"cache__retention": -1}, "cache.retention"),
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
@pytest.mark.parametrize("path", ["sampling__temperature", "sampling__top_p", "deadline_seconds"])
def test_no_float_may_be_other_than_finite(path: str, value: float) -> None:
    error = refusal(make_submit(**{path: value}))
    assert (error.code, error.field) == (INVALID_ARGUMENT, path.replace("__", "."))
    assert str(error).isascii()


def test_max_tokens_must_be_set() -> None:
    submit = make_submit()
    submit.sampling.ClearField("max_tokens")
    assert refusal(submit).field == "sampling.max_tokens"


UNSERVED: list[tuple[str, Callable[[worker_pb2.Submit], object]]] = [
    ("sampling.min_p", lambda s: setattr(s.sampling, "min_p", 0.0)),
    ("sampling.min_tokens", lambda s: setattr(s.sampling, "min_tokens", 0)),
    ("sampling.repetition_penalty", lambda s: setattr(s.sampling, "repetition_penalty", 1.0)),
    ("sampling.presence_penalty", lambda s: setattr(s.sampling, "presence_penalty", 0.0)),
    ("sampling.frequency_penalty", lambda s: setattr(s.sampling, "frequency_penalty", math.nan)),
    ("sampling.logit_bias", lambda s: s.sampling.logit_bias.update({1: 2.0})),
    ("sampling.allowed_ids", lambda s: s.sampling.allowed_ids.append(1)),
    ("sampling.banned_ids", lambda s: s.sampling.banned_ids.append(1)),
    ("sampling.logprobs", lambda s: setattr(s.sampling, "logprobs", 10**6)),
    ("sampling.prompt_logprobs", lambda s: setattr(s.sampling, "prompt_logprobs", 0)),
    ("cache.ttl_seconds", lambda s: setattr(s.cache, "ttl_seconds", 1.0)),
    ("priority", lambda s: setattr(s, "priority", 0)),
    ("time_limit_ms", lambda s: setattr(s, "time_limit_ms", 1)),
]


@pytest.mark.parametrize(("field", "set_field"), UNSERVED)
def test_fields_not_served_yet_are_refused_by_name(
    field: str, set_field: Callable[[worker_pb2.Submit], object]
) -> None:
    submit = make_submit()
    set_field(submit)
    error = refusal(submit)
    assert (error.code, error.field) == (UNIMPLEMENTED, field)


def test_every_field_of_the_messages_is_either_known_to_the_rules_or_refused() -> None:
    """A field added to a message must not slip through unchecked."""
    served = {"temperature", "top_k", "top_p", "seed", "max_tokens", "stop_ids", "ignore_eos"}
    unserved = {field.partition(".")[2] for field, _ in UNSERVED if field.startswith("sampling.")}
    assert {field.name for field in generation_pb2.SamplingParams.DESCRIPTOR.fields} == served | unserved
    assert {field.name for field in generation_pb2.CacheControl.DESCRIPTOR.fields} == {
        "mode",
        "salt",
        "ttl_seconds",
        "retention",
    }


def test_messages_about_long_values_are_short() -> None:
    with pytest.raises(FieldError) as caught:
        check_text("salt", "x" * 1_000_000)
    assert len(str(caught.value)) < 200
    assert len(shown("é" * 1_000_000)) < 100
    assert shown("a\0b") == "'a\\x00b'"


def test_a_million_ids_are_refused_by_length_first() -> None:
    error = refusal(make_submit(token_ids=[2**32 - 1] * 1_200_000))
    assert "1200000 tokens" in str(error)
