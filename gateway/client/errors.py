"""Every way a call can fail, as the client sees it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import grpc

from prefixgate.proto.status_details import unpack
from prefixgate.proto.transport import REQUEST_ID_KEY, STATUS_DETAILS_KEY

_Metadata = Sequence[tuple[str, str | bytes]]


class FieldViolation(NamedTuple):
    """A field that the gateway refused."""

    field: str
    """Its path, such as ``sampling.top_p``."""
    description: str
    """The value and what is allowed."""


class GatewayError(Exception):
    """A call that failed. Its text is the gateway's own, or gRPC's where the gateway was not reached."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field_violations: tuple[FieldViolation, ...] = (),
        retry_delay: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field_violations = field_violations
        """The fields that were refused, where that was the reason."""
        self.retry_delay = retry_delay
        """Seconds after which the gateway expects to take such a call; None where it did not say."""
        self.request_id = request_id
        """The call's name in the gateway's log; empty where the gateway did not tell it."""

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class InvalidRequestError(GatewayError):
    """A field breaks a rule, or is not served: INVALID_ARGUMENT, OUT_OF_RANGE, UNIMPLEMENTED, FAILED_PRECONDITION."""


class UnauthenticatedError(GatewayError):
    """No credential, or one that is not known."""


class PermissionDeniedError(GatewayError):
    """The credential is known, and does not allow this."""


class NotFoundError(GatewayError):
    """What the call names is not there, such as a model or a pin."""


class OverloadedError(GatewayError):
    """There is no room for the call now, or a limit was reached: RESOURCE_EXHAUSTED."""


class UnavailableError(GatewayError):
    """No gateway answers, or it has no worker, or it shuts down."""


class DeadlineExceededError(GatewayError):
    """The call's timeout passed before it ended."""


class CallCancelledError(GatewayError):
    """The call was cancelled, by closing its stream or its client, or by a gateway that ended."""


class BrokenStreamError(GatewayError):
    """The stream ended without the message that ends it, so that what has come may be half of an answer."""


_CLASSES: Mapping[grpc.StatusCode, type[GatewayError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CallCancelledError,
}


def error_of(error: grpc.RpcError) -> GatewayError:
    """Translate what gRPC raised, on either kind of channel."""
    # Both have these; the type hints name them only where they are of no use here.
    code: grpc.StatusCode = getattr(error, "code")()  # noqa: B009
    details: str | None = getattr(error, "details")()  # noqa: B009
    metadata: _Metadata = tuple(getattr(error, "trailing_metadata")() or ())  # noqa: B009
    return make_error(code, details or "no reason given", metadata)


def make_error(code: grpc.StatusCode, message: str, metadata: _Metadata = ()) -> GatewayError:
    """Make the error of a status, with what its trailing metadata says more."""
    values = dict(metadata)
    details = unpack(values.get(STATUS_DETAILS_KEY, b""))
    request_id = values.get(REQUEST_ID_KEY, "")
    return _CLASSES.get(code, GatewayError)(
        code,
        message,
        field_violations=tuple(FieldViolation(*violation) for violation in details.violations),
        retry_delay=details.retry_seconds,
        request_id=request_id if isinstance(request_id, str) else "",
    )
