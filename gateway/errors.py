"""Every way a call can fail, and the status that the client gets for it."""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import grpc
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import QuotaFailure  # type: ignore[import-untyped]

from prefixgate.proto.fields import FieldError
from prefixgate.proto.status_details import field_violation, pack, retry_after
from prefixgate.proto.transport import REQUEST_ID_KEY, STATUS_DETAILS_KEY

_MAX_MESSAGE_CHARACTERS = 2000
"""A status travels as metadata, which is bounded."""

CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class CallError(Exception):
    """A call that ends with a status of its own. The text can be shown to the client."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_seconds: float = 0.0, *, field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.retry_seconds = retry_seconds
        """When to try again, where that is known; else 0."""
        self.field = field
        """The path of the field that is at fault, where one is."""


class QuotaError(CallError):
    """A tenant, or all of them together, used up what the operator allows for now."""

    def __init__(self, subject: str, limit: str, message: str, retry_seconds: float) -> None:
        """``limit`` is the setting's name and ``subject`` says whose it is; ``message`` has the value and the bound."""
        message = f"limits.{limit} of {subject}: {message}; try again in {retry_seconds:.3f} s"
        super().__init__(grpc.StatusCode.RESOURCE_EXHAUSTED, message, retry_seconds)
        self.subject = subject
        self.limit = limit


class NoWorkerError(CallError):
    """There is no worker to send a call to, or it went away with the call."""

    def __init__(self, message: str = "no worker is ready; try again later") -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, message)


class DrainingError(CallError):
    """The gateway finishes what it has and takes nothing more."""

    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, "the gateway is shutting down; try again elsewhere or later")


class ErrorStatus(NamedTuple):
    """What a failed call ends with."""

    code: grpc.StatusCode
    message: str
    metadata: tuple[tuple[str, str | bytes], ...]
    is_expected: bool
    """False for a fault of ours, which is to be logged with its traceback."""


def status_of(error: BaseException, request_id: str) -> ErrorStatus:
    """Map what a handler raised to a status.

    An exception that nobody planned is INTERNAL, and its text, which may hold anything, stays in our log.
    """
    metadata: tuple[tuple[str, str | bytes], ...] = ((REQUEST_ID_KEY, request_id),)
    if isinstance(error, FieldError):
        code, message = CODES[error.code], _cut(str(error))
        return ErrorStatus(
            code,
            message,
            (*metadata, (STATUS_DETAILS_KEY, pack(error.code, message, field_violation(error.field, message)))),
            True,
        )
    if isinstance(error, CallError):
        message = _cut(str(error))
        if details := _call_error_details(error, message):
            metadata = (*metadata, (STATUS_DETAILS_KEY, pack(error.code.value[0], message, *details)))
        return ErrorStatus(error.code, message, metadata, True)
    message = f"internal error; the gateway's log says more under request id {request_id}"
    return ErrorStatus(grpc.StatusCode.INTERNAL, message, metadata, False)


def worker_error(code: int, message: str, retry_seconds: float = 0.0, field: str = "") -> CallError:
    """Make the error of a call that the worker ended with a status other than OK."""
    status = CODES.get(code, grpc.StatusCode.INTERNAL)
    if status is grpc.StatusCode.CANCELLED:
        # The gateway stops listening to a call that it cancels, so this was not the client's wish.
        return NoWorkerError(message or "the worker gave the call up")
    return CallError(status, message, retry_seconds, field=field)


def is_being_cancelled() -> bool:
    """Tell, in an ``except CancelledError``, whether somebody wants the running task itself to end.

    If not, the error came out of something that the task waited for, and must not pass for the client's own cancel.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _call_error_details(error: CallError, message: str) -> list[Message]:
    details: list[Message] = []
    if isinstance(error, QuotaError):
        violation = QuotaFailure.Violation(subject=error.subject, description=str(error))
        details.append(QuotaFailure(violations=[violation]))
    if error.field:
        details.append(field_violation(error.field, message))
    if error.retry_seconds > 0:
        details.append(retry_after(error.retry_seconds))
    return details


def _cut(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_CHARACTERS else message[:_MAX_MESSAGE_CHARACTERS] + "…"
