"""Messages as JSON, with the proto's own names and numbers that stay numbers."""

import json
import sys
from typing import Any

from google.protobuf.message import Message

JSON_HELP = "print JSON instead of text"


def json_form(message: Message) -> dict[str, Any]:
    """Give a message as a JSON object. Zeros are there too, messages that are not set are null, enums are names.

    The library's own form writes integers of 64 bits as text.
    """
    return {field.name: _value(message, field.name) for field in message.DESCRIPTOR.fields}


def print_json(form: Any) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(form, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _value(message: Message, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if field.has_presence and not message.HasField(name):
        return None
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.message_type is None:
        return list(value) if field.is_repeated else value
    return [json_form(item) for item in value] if field.is_repeated else json_form(value)
