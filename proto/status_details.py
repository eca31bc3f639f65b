"""What a status says to programs, as google.rpc.Status has it: the fields that were refused, and when to try again."""

import math
from typing import NamedTuple

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]


class Violation(NamedTuple):
    """A field that was refused, and why."""

    field: str
    description: str


class Details(NamedTuple):
    """What was read of a status."""

    violations: tuple[Violation, ...] = ()
    retry_seconds: float | None = None
    """When trying again may help; None where nothing is said of it."""


def field_violation(field: str, description: str) -> Message:
    """Say that a field was refused."""
    message: Message = BadRequest(field_violations=[BadRequest.FieldViolation(field=field, description=description)])
    return message


def retry_after(seconds: float) -> Message:
    """Say when trying again may help."""
    delay = Duration()
    # Up, so that who comes back right then is not too early.
    delay.FromMilliseconds(math.ceil(seconds * 1e3))
    message: Message = RetryInfo(retry_delay=delay)
    return message


def pack(code: int, message: str, *infos: Message) -> bytes:
    """Make the metadata of a status that carries details."""
    details = [Any() for _ in infos]
    for detail, info in zip(details, infos, strict=True):
        detail.Pack(info)
    return bytes(Status(code=code, message=message, details=details).SerializeToString())


def unpack(data: str | bytes) -> Details:
    """Read it; what is no such metadata says nothing. The status itself says enough."""
    violations: list[Violation] = []
    retry_seconds: float | None = None
    try:
        for detail in Status.FromString(data if isinstance(data, bytes) else b"").details:
            bad_request, retry_info = BadRequest(), RetryInfo()
            if detail.Unpack(bad_request):
                violations += [Violation(entry.field, entry.description) for entry in bad_request.field_violations]
            elif detail.Unpack(retry_info):
                retry_seconds = retry_info.retry_delay.ToTimedelta().total_seconds()
    except DecodeError:
        return Details()
    return Details(tuple(violations), retry_seconds)
