"""The rules themselves: what each takes and refuses, and what it says of itself."""

import math
from typing import Any

import pytest

from prefixgate.proto import gateway_pb2, generation_pb2
from prefixgate.proto.fields import (
    INVALID_ARGUMENT,
    AnyValue,
    Bound,
    Bounds,
    EnumName,
    FieldError,
    IdMap,
    Ids,
    Items,
    Message,
    Number,
    OneOf,
    Row,
    Rule,
    Text,
)

BOUNDS = Bounds(
    {Bound.VOCABULARY_SIZE: 100, Bound.OUTPUTS: 4, Bound.PROMPT_BYTES: 8, Bound.STOPS: 2},
    settings={Bound.OUTPUTS: "max_outputs", Bound.STOPS: "max_stops"},
)


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (Number(0, 2), 0),
        (Number(0, 2), -0.0),
        (Number(0, 2), 2),
        (Number(0, above_low=True), 5e-324),
        (Number(1), 2**63 - 1),
        (Number(1, Bound.OUTPUTS), 4),
        (Text(0, 4), ""),
        (Text(1, 4), "éé"),
        (Text(1, Bound.PROMPT_BYTES), "x" * 8),
        (Text(is_printable_ascii=True), "a b~"),
        (Ids(0, 3), []),
        (Ids(1, 3), [0, 99, 99]),
        (IdMap(2, Number(-1, 1)), {0: -1.0, 99: 1.0}),
        (Items(0, Bound.STOPS, "strings", Text(1, 2)), ["a", "bc"]),
        (EnumName("CacheMode", (0, 1)), 1),
        (AnyValue(), object()),
        (OneOf(("a", "b")), "b"),
    ],
)
def test_what_keeps_to_a_rule_is_taken(rule: Rule, value: Any) -> None:
    rule.check("field", value, BOUNDS)


@pytest.mark.parametrize(
    ("rule", "value", "message", "limit"),
    [
        (Number(0, 2), 2.5, "field: 2.5 is out of range; must be in [0, 2]", ""),
        (Number(0, 2, above_low=True), 0, "field: 0 is out of range; must be in (0, 2]", ""),
        (Number(0, 2), math.nan, "field: nan is out of range; must be in [0, 2]", ""),
        (Number(0, above_low=True), math.inf, "field: inf is out of range; must be greater than 0 and finite", ""),
        (Number(1), 0, "field: 0 is out of range; must be at least 1", ""),
        (
            Number(1, Bound.OUTPUTS),
            5,
            "field: 5 is out of range; must be in [1, 4] (limits.max_outputs)",
            "max_outputs",
        ),
        (Number(1, Bound.OUTPUTS), 0, "field: 0 is out of range; must be in [1, 4]", ""),
        (Text(1, 4), "", "field: is 0 bytes long; must be at least 1", ""),
        (Text(0, 4), "ééé", "field: is at least 6 bytes long; must be at most 4", ""),
        (Text(0, Bound.PROMPT_BYTES), "x" * 9, "field: is at least 9 bytes long; must be at most 8", ""),
        (Text(is_printable_ascii=True), "a\nb", "field: 'a\\nb' is not printable ASCII", ""),
        (Ids(1, 3), [], "field: 0 ids; must be at least 1", ""),
        (Ids(1, 3), [2**32 - 1] * 4, "field: 4 ids; must be at most 3", ""),
        (Ids(1, 3), [100], "field: token id 100 is outside the vocabulary; must be below 100", ""),
        (IdMap(1, Number(-1, 1)), {1: 0.0, 2: 0.0}, "field: 2 ids; must be at most 1", ""),
        (IdMap(1, Number(-1, 1)), {1: 2.0}, "field[1]: 2.0 is out of range; must be in [-1, 1]", ""),
        (
            Items(0, Bound.STOPS, "strings", Text(1, 2)),
            ["a"] * 3,
            "field: 3 strings; must be at most 2 (limits.max_stops)",
            "max_stops",
        ),
        (Items(0, 9, "strings", Text(1, 2)), ["a", ""], "field[1]: is 0 bytes long; must be at least 1", ""),
        (EnumName("CacheMode", (0, 1)), 7, "field: 7 is no CacheMode; must be one of 0, 1", ""),
        (OneOf(("a", "b")), None, "field: is not set; one of a, b must be", ""),
    ],
)
def test_what_breaks_a_rule_is_refused_with_field_value_and_bound(
    rule: Rule, value: Any, message: str, limit: str
) -> None:
    with pytest.raises(FieldError) as caught:
        rule.check("field", value, BOUNDS)
    assert (str(caught.value), caught.value.limit, caught.value.code) == (message, limit, INVALID_ARGUMENT)
    assert caught.value.field == message.partition(":")[0]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Number(0, 2), "in [0, 2]"),
        (Number(1, Bound.OUTPUTS), "in [1, `max_outputs`]"),
        (Text(1, 1024), "1 to 1,024 bytes"),
        (Text(is_printable_ascii=True), "0 to 128 bytes of printable ASCII"),
        (Items(1, 16, "strings", Text(1, 2)), "1 to 16 strings, each of 1 to 2 bytes"),
        (IdMap(9, Number(-1, 1)), "at most 9 ids, each inside the vocabulary; values in [-1, 1]"),
        (AnyValue("the worker's own"), "the worker's own"),
    ],
)
def test_a_rule_says_what_it_allows(rule: Rule, said: str) -> None:
    assert rule.allowed == said


def test_a_message_is_checked_field_by_field_then_whole_and_absent_is_not_zero() -> None:
    seen: list[str] = []
    number = Message({"temperature": Row(Number(1, 2))}, lambda path, message, bounds: seen.append(path))
    rules = Message({"sampling": Row(number, required=True), "n": Row(Number(1))})
    request = gateway_pb2.GenerateRequest()
    with pytest.raises(FieldError, match=r"^sampling: is not set; it must be$"):
        rules.check("", request, BOUNDS)
    request.sampling.SetInParent()
    rules.check("", request, BOUNDS)
    assert seen == ["sampling"]
    request.sampling.CopyFrom(generation_pb2.SamplingParams(temperature=0))
    with pytest.raises(FieldError, match=r"^sampling\.temperature: 0\.0 is out of range"):
        rules.check("", request, BOUNDS)
    assert seen == ["sampling"], "the whole is not looked at where a field is broken"
