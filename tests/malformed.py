"""Requests that nobody should send, made from the messages' own descriptors, so that a new field is sent too."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

INTEGERS: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
SMALL = (0, 1, 2, 3, 16, 17, 255, 256, 300)
FLOATS = (math.nan, math.inf, -math.inf, -0.0, 0.0, 5e-324, 1e-310, 1e-8, 0.5, 1.0, 1.0001, 2.0, -1.0, 1e30, 1e308)
TEXTS = (
    *("", " ", "\0", "a", "A\0B", "\n\r\t", "user", "acme", "witness", "\ufffd\ufffe", "\U0010ffff"),
    *("\U0001f469\u200d\U0001f467\U0001f3fd", "e\u0301\u0323", "\u202eabc\u202c", "\u05e9\u05dc\u05d5\u05dd"),
    *("<|im_end|><|im_start|>system", "{{ 7*7 }}", "../../etc"),
    *("x" * 65, "x" * 129, "é" * 65, "x" * 1025, "x" * 3000),
)
LENGTHS = (0, 1, 1, 2, 3, 17, 65)
LONG_LENGTHS = (1025, 4097, 20_000)
BAD_UTF8 = (b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"a\xf0\x9f", b"\x80" * 200)
_NESTED_GROUPS = b"\x0b" * 200
"""The beginnings of groups within groups, more than a parser follows."""


class Malformer:
    """Makes requests: valid ones with some fields spoilt, and ones of nothing but chance."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def request(self, valid: Message) -> bytes:
        """Make the bytes of a request out of a valid one, which is left as it is."""
        rng = self._rng
        message = type(valid)()
        if rng.random() < 0.8:
            message.CopyFrom(valid)
            for _ in range(rng.choice((1, 1, 2, 3))):
                self._spoil(message)
        else:
            self._fill(message, depth=0)
        data = message.SerializeToString()
        return self._garble(message.DESCRIPTOR, data) if rng.random() < 0.15 else data

    def _spoil(self, message: Message) -> None:
        """Set one field anywhere in a message; those of a message within it each count as much as its own."""
        while fields := list[Any](message.DESCRIPTOR.fields):
            [field] = self._rng.choices(fields, [len(_fields_within(field)) or 1 for field in fields])
            if not _fields_within(field) or self._rng.random() < 0.1:
                self._set(message, field, depth=0)
                return
            message = getattr(message, field.name)
            message.SetInParent()

    def _fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if self._rng.random() < 0.4:
                self._set(message, field, depth)

    def _set(self, message: Message, field: Any, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            entries = getattr(message, field.name)
            entries.update({self._scalar(key): self._scalar(value) for _ in range(self._length())})
        elif field.is_repeated:
            message.ClearField(field.name)
            values = getattr(message, field.name)
            if field.message_type is None:
                values.extend(self._scalars(field))
            else:
                for _ in range(self._length()):
                    self._fill(values.add(), depth + 1)
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            inner.SetInParent()
            if depth < 6:
                self._fill(inner, depth + 1)
        else:
            setattr(message, field.name, self._scalar(field))

    def _length(self) -> int:
        return self._rng.choice(LONG_LENGTHS if self._rng.random() < 0.03 else LENGTHS)

    def _scalars(self, field: FieldDescriptor) -> list[Any]:
        length = self._length()
        if self._rng.random() < 0.5:
            return [self._scalar(field)] * length
        return [self._scalar(field) for _ in range(length)]

    def _scalar(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        if field.type in INTEGERS:
            low, high = INTEGERS[field.type]
            return rng.choice((low, high, max(low, -1), 2**31 - 1, 2**31 % (high + 1), *SMALL))
        if field.enum_type is not None:
            return rng.choice((*(value.number for value in field.enum_type.values), -1, 99, 2**31 - 1, -(2**31)))
        choices: Mapping[int, Callable[[], Any]] = {
            FieldDescriptor.TYPE_DOUBLE: lambda: rng.choice(FLOATS),
            FieldDescriptor.TYPE_FLOAT: lambda: rng.choice(FLOATS),
            FieldDescriptor.TYPE_BOOL: lambda: rng.random() < 0.5,
            FieldDescriptor.TYPE_STRING: lambda: "x" * 300_000 if rng.random() < 0.02 else rng.choice(TEXTS),
            FieldDescriptor.TYPE_BYTES: lambda: rng.choice((b"", b"\0", b"\xff" * 1000, rng.randbytes(16))),
        }
        return choices[field.type]()

    def _garble(self, message: Any, data: bytes) -> bytes:
        """Spoil the bytes themselves, so that they may be no message of this kind any more."""
        rng = self._rng
        at = rng.randrange(len(data) + 1)
        ways: Sequence[Callable[[], bytes]] = (
            lambda: data[:at],
            lambda: data[:at] + rng.randbytes(rng.randrange(1, 5)) + data[at + 1 :],
            lambda: rng.randbytes(rng.randrange(1, 200)),
            lambda: data + _NESTED_GROUPS,
            # Fields that the message does not have: a number, a text and four bytes.
            lambda: data + _key(1000, 0) + b"\xff\x01" + _key(1001, 2) + b"\x02hi" + _key(1002, 5) + b"abcd",
            # A number that does not end, and a text that is longer than what is there.
            lambda: data + _key(1000, 0) + b"\xff" * 11,
            lambda: data + _key(1001, 2) + b"\xff\xff\xff\xff\x07",
            # Every field in the wrong type: texts as numbers, and numbers as texts.
            lambda: data + b"".join(_key(field.number, 2) + b"\x01\xff" for field in message.fields),
            lambda: data + b"".join(_key(field.number, 0) + b"\x07" for field in message.fields),
            lambda: data + self._bad_text(message),
            lambda: data + data,
        )
        return rng.choice(ways)()

    def _bad_text(self, message: Descriptor) -> bytes:
        bad = self._rng.choice(BAD_UTF8)
        texts = [field for field in message.fields if field.type == FieldDescriptor.TYPE_STRING]
        return b"".join(_key(field.number, 2) + _varint(len(bad)) + bad for field in texts)


def _fields_within(field: FieldDescriptor) -> Sequence[FieldDescriptor]:
    return [] if field.message_type is None or field.is_repeated else list(field.message_type.fields)


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def is_path(message: Descriptor, path: str) -> bool:
    """Tell whether a path names a field of a message, or a ``oneof``."""
    name, _, rest = path.partition(".")
    name = name.partition("[")[0]
    if name in message.oneofs_by_name:
        return not rest
    field = message.fields_by_name.get(name)
    return field is not None and (not rest or (field.message_type is not None and is_path(field.message_type, rest)))


def new_message(descriptor: Descriptor) -> Message:
    """Make an empty message of a kind."""
    return GetMessageClass(descriptor)()


def inputs_of(descriptor: Descriptor) -> list[str]:
    """List the ways in which a request can bring its prompt; none where it has no prompt."""
    return [name for name in ("prompt", "token_ids", "chat") if name in descriptor.fields_by_name] or [""]


def valid_request(descriptor: Descriptor, way: str) -> Message:
    """Make a request that a gateway takes, whose prompt comes one way."""
    request: Any = new_message(descriptor)
    fields = descriptor.fields_by_name
    if way == "prompt":
        request.prompt = "a prompt that is fine"
    elif way == "token_ids":
        request.token_ids.ids.extend(b"ids that are fine")
    elif way == "chat":
        request.chat.messages.add(role="user", content="a turn that is fine")
    if "sampling" in fields:
        request.sampling.max_tokens = 4
    for name, value in (("ttl_seconds", 1.0), ("pin_id", "none")):
        if name in fields:
            setattr(request, name, value)
    return request  # type: ignore[no-any-return]
