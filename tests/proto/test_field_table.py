"""No field of any request, on either hop, is without a row; and each row's rule fits its field's type."""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from prefixgate.proto import gateway_pb2, worker_pb2
from prefixgate.proto.field_table import TABLE
from prefixgate.proto.fields import (
    AnyValue,
    EnumName,
    IdMap,
    Ids,
    Items,
    Message,
    Number,
    OneOf,
    Rule,
    Text,
)

SERVICES = [gateway_pb2.DESCRIPTOR.services_by_name["Gateway"], worker_pb2.DESCRIPTOR.services_by_name["Worker"]]
NUMBERS = {
    *(FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT),
    *(FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64),
}


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def reachable(message: Descriptor) -> Iterator[Descriptor]:
    """List a message and all that its fields can hold."""
    found, waiting = [], [message]
    while waiting:
        message = waiting.pop()
        if message in found:
            continue
        found.append(message)
        waiting += [field.message_type for field in message.fields if field.message_type and not is_map(field)]
    return iter(found)


REQUESTS = {
    message.name: message
    for service in SERVICES
    for method in service.methods
    for message in reachable(method.input_type)
}
FIELDS = [(message, field) for message in REQUESTS.values() for field in message.fields]


def kinds_for(field: FieldDescriptor) -> tuple[type[Any], ...]:
    """Tell which rules make sense of a field's values."""
    if is_map(field):
        return (IdMap,)
    if field.message_type is not None:
        return (Items,) if field.is_repeated else (Message,)
    if field.is_repeated:
        return (Ids,) if field.type in NUMBERS else (Items,)
    if field.enum_type is not None:
        return (EnumName,)
    if field.type in NUMBERS:
        return (Number, AnyValue)
    return {
        FieldDescriptor.TYPE_STRING: (Text, AnyValue),
        FieldDescriptor.TYPE_BYTES: (AnyValue,),
        FieldDescriptor.TYPE_BOOL: (AnyValue,),
    }[field.type]


def test_every_request_of_both_hops_has_its_rows_and_nothing_else_has_any() -> None:
    assert set(TABLE) == set(REQUESTS)


@pytest.mark.parametrize("message", REQUESTS.values(), ids=lambda message: message.name)
def test_every_field_has_a_row_and_every_row_a_field(message: Descriptor) -> None:
    oneofs = {oneof.name for oneof in message.oneofs if not oneof.name.startswith("_")}
    rows = set(TABLE[message.name].rows)
    assert rows - oneofs == set(message.fields_by_name)


@pytest.mark.parametrize(("message", "field"), FIELDS, ids=lambda found: found.name)
def test_a_rule_fits_the_type_of_its_field(message: Descriptor, field: FieldDescriptor) -> None:
    rule: Rule = TABLE[message.name].rows[field.name].rule
    assert isinstance(rule, kinds_for(field))
    inner = rule.each if isinstance(rule, Items) else rule
    if field.message_type is not None and not is_map(field):
        assert inner is TABLE[field.message_type.name], "the rows of the message that the field holds"
    if isinstance(rule, EnumName):
        assert field.enum_type is not None
        assert list(rule.numbers) == [value.number for value in field.enum_type.values]


@pytest.mark.parametrize("message", REQUESTS.values(), ids=lambda message: message.name)
def test_a_field_that_is_required_can_be_seen_to_be_absent(message: Descriptor) -> None:
    for name, row in TABLE[message.name].rows.items():
        if isinstance(row.rule, OneOf):
            assert list(row.rule.names) == [field.name for field in message.oneofs_by_name[name].fields]
        elif row.required:
            assert message.fields_by_name[name].has_presence, name
        if row.default:
            assert not row.required, f"{name}: what must be set has no default"
