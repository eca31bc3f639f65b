"""For each field of a request, a value that its row in the table of fields refuses."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as Proto

from prefixgate.proto.field_table import TABLE
from prefixgate.proto.fields import AnyValue, EnumName, IdMap, Ids, Items, Message, Number, OneOf, Rule, Text
from tests.malformed import INTEGERS

LONG = "x" * 2000
"""Longer than any text may be where these are sent."""
NO_ID = 2**32 - 1


class Broken(NamedTuple):
    """A request with one field that breaks its rule."""

    path: str
    request: Proto

    def __str__(self) -> str:
        return f"{self.request.DESCRIPTOR.name}-{self.path}"


def broken(valid: Proto) -> Iterator[Broken]:
    """Break each field of a valid request, those of the messages within it too."""
    for path, parents, name, rule in _places(TABLE[valid.DESCRIPTOR.name], "", ()):
        request = type(valid)()
        request.CopyFrom(valid)
        message: Any = request
        for parent in parents:
            message = getattr(message, parent)
            if isinstance(message, Proto):
                message.SetInParent()
            else:  # messages of a chat
                message = message[0] if message else message.add(role="user")
        yield Broken(path + _break(message, name, rule), request)


def _places(message: Message, path: str, parents: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], str, Rule]]:
    """List the fields with rules of their own: their paths, the fields that lead to them, their names and rules."""
    for name, row in message.rows.items():
        rule, here = row.rule, f"{path}.{name}" if path else name
        if isinstance(rule, Message):
            yield from _places(rule, here, (*parents, name))
        elif isinstance(rule, Items) and isinstance(rule.each, Message):
            yield from _places(rule.each, f"{here}[0]", (*parents, name))
        elif not isinstance(rule, AnyValue):
            yield here, parents, name, rule


def _break(message: Any, name: str, rule: Rule) -> str:
    """Give a field a value that its rule refuses, and return what the error's path has after the field's own."""
    if isinstance(rule, OneOf):
        for field in rule.names:
            message.ClearField(field)
    elif isinstance(rule, Ids):
        getattr(message, name)[:] = [NO_ID]
    elif isinstance(rule, IdMap):
        getattr(message, name)[NO_ID] = 1.0
    elif isinstance(rule, Items):
        getattr(message, name)[:] = [LONG]
        return "[0]"
    else:
        setattr(message, name, _value(message.DESCRIPTOR.fields_by_name[name], rule))
    return ""


def _value(field: FieldDescriptor, rule: Rule) -> Any:
    if isinstance(rule, Text):
        return LONG
    if isinstance(rule, EnumName):
        return 99
    assert isinstance(rule, Number), f"no value is known that breaks {rule}"
    if field.type not in INTEGERS:
        return math.nan
    return INTEGERS[field.type][1] if rule.high != math.inf else int(rule.low) - 1
