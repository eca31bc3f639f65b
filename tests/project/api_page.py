"""The reference page of the protocol, `docs/api.md`: made from the comments of the `.proto` files and the table of
fields. `make reference` writes it anew. It stands here, as the compiler that keeps comments is none of the product's
dependencies."""

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc import StatusCode
from grpc_tools import protoc  # type: ignore[import-untyped]

from prefixgate.proto.field_table import TABLE
from prefixgate.proto.fields import INVALID_ARGUMENT, AnyValue, Row
from tests.project.tree import ROOT

HEAD = """\
# The protocol

Every method, message and field, made by `make reference` from the comments of `proto/*.proto` and from the table of
fields by which both hops check what they get. *Allowed* names bounds that the operator sets or the model brings. A call
with a field outside of it ends with the status in *else*, and its details (`google.rpc.BadRequest`) name the field. A
field that a message does not have is ignored, as in all of protobuf; bytes that are no message are INVALID_ARGUMENT.
"""
PARTS: Mapping[str, str] = {
    "gateway.proto": "Clients to gateway",
    "generation.proto": "Nouns of both hops",
    "worker.proto": "Gateway to worker",
}
_CODES = {code.value[0]: code.name for code in StatusCode}
_TYPES = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}
# Where descriptor.proto keeps what a path of comments leads to.
_SERVICES, _MESSAGES, _ENUMS, _SYNTAX = 6, 4, 5, 12
_METHODS, _FIELDS, _ONEOFS, _VALUES = 2, 2, 8, 2


class File(NamedTuple):
    """A `.proto` file and its comments, by path."""

    described: FileDescriptorProto
    comments: Mapping[tuple[int, ...], str]
    head: str


def page() -> str:
    """Write the page."""
    files = {Path(file.described.name).name: file for file in _files()}
    lines = [HEAD]
    for name, title in PARTS.items():
        lines += [f"## {title}", "", *_part(files[name])]
    return "\n".join(lines).rstrip("\n") + "\n"


def _files() -> Iterator[File]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "described"
        sources = [str(path) for path in sorted((ROOT / "proto").glob("*.proto"))]
        options = [f"-Iprefixgate/proto={ROOT / 'proto'}", "--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *options, *sources]):
            raise ValueError("the .proto files do not compile")
        described = FileDescriptorSet.FromString(out.read_bytes())
    for file in described.file:
        comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        [syntax] = [place for place in file.source_code_info.location if list(place.path) == [_SYNTAX]]
        yield File(file, comments, _unindented(syntax.leading_comments))


def _part(file: File) -> Iterator[str]:
    yield from (file.head, "")
    for index, service in enumerate(file.described.service):
        yield from (f"### {service.name}", "", _text(file, _SERVICES, index), "")
        yield from ("| method | request | answer | meaning |", "|---|---|---|---|")
        for number, method in enumerate(service.method):
            request = _stream(method.client_streaming) + _link(method.input_type)
            answer = _stream(method.server_streaming) + _link(method.output_type)
            yield _row(f"`{method.name}`", request, answer, _text(file, _SERVICES, index, _METHODS, number))
        yield ""
    for index, message in enumerate(file.described.message_type):
        yield from (f"### {message.name}", "", _text(file, _MESSAGES, index), "")
        yield from _message(file, index, message)
    for index, enum in enumerate(file.described.enum_type):
        yield from (f"### {enum.name}", "", _text(file, _ENUMS, index), "", *_enum(file, index, enum), "")


def _message(file: File, index: int, message: DescriptorProto) -> Iterator[str]:
    for number, oneof in enumerate(message.oneof_decl):
        if not oneof.name.startswith("_"):
            said = _text(file, _MESSAGES, index, _ONEOFS, number)
            names = [f"`{field.name}`" for field in message.field if _oneof(message, field) == oneof.name]
            yield from (f"`{oneof.name}` is one of {', '.join(names)}. {said}".strip(), "")
    if not message.field:
        return
    is_request = message.name in TABLE
    rows = TABLE[message.name].rows if is_request else {}
    titles = ["field", "type", *(["unit", "default", "allowed", "else"] if is_request else []), "meaning"]
    yield from (_row(*titles), "|" + "---|" * len(titles))
    for number, field in enumerate(message.field):
        meaning = _text(file, _MESSAGES, index, _FIELDS, number)
        cells = _cells(rows[field.name]) if is_request else ()
        yield _row(f"`{field.name}`", _type(message, field), *cells, meaning)
    yield ""


def _cells(row: Row) -> Sequence[str]:
    codes = [INVALID_ARGUMENT] if row.rule.allowed and not isinstance(row.rule, AnyValue) else []
    codes += [row.code] if row.code not in (0, *codes) else []
    default = "must be set" if row.required else row.default
    return row.unit, default, row.rule.allowed, ", ".join(_CODES[code] for code in codes)


def _enum(file: File, index: int, enum: EnumDescriptorProto) -> Iterator[str]:
    yield from ("| name | number | meaning |", "|---|---|---|")
    for number, value in enumerate(enum.value):
        yield _row(f"`{value.name}`", str(value.number), _text(file, _ENUMS, index, _VALUES, number))


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{nested.name}"):
            key, value = nested.field
            return f"map of {_type(nested, key)} to {_type(nested, value)}"
    name = _link(field.type_name) if field.type_name else _TYPES[field.type]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    oneof = _oneof(message, field)
    if not oneof:
        return name
    return f"optional {name}" if oneof.startswith("_") else f"{name}, of `{oneof}`"


def _oneof(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Name the ``oneof`` that a field belongs to; that of an optional field begins with ``_``."""
    return message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""


def _text(file: File, *path: Any) -> str:
    return " ".join(file.comments.get(path, "").split())


def _unindented(text: str) -> str:
    return re.sub(r"^ ", "", text, flags=re.MULTILINE).strip()


def _stream(streaming: bool) -> str:
    return "stream of " if streaming else ""


def _link(name: str) -> str:
    short = name.rpartition(".")[2]
    return f"[{short}](#{short.lower()})"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(page())
