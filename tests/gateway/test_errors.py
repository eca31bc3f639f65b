"""Errors to statuses: each kind has one, and a long or strange text never breaks the way to the client."""

import grpc
import pytest
from google.rpc.error_details_pb2 import QuotaFailure, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from prefixgate.gateway.errors import CallError, DrainingError, NoWorkerError, QuotaError, status_of, worker_error
from prefixgate.proto.fields import invalid
from prefixgate.proto.status_details import unpack
from prefixgate.proto.transport import REQUEST_ID_KEY


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (invalid("n", "0 is out of range"), grpc.StatusCode.INVALID_ARGUMENT),
        (CallError(grpc.StatusCode.NOT_FOUND, "model"), grpc.StatusCode.NOT_FOUND),
        (NoWorkerError(), grpc.StatusCode.UNAVAILABLE),
        (DrainingError(), grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_expected_errors_have_their_own_status_and_text(error: Exception, code: grpc.StatusCode) -> None:
    status = status_of(error, "my-call")
    assert (status.code, status.message, status.is_expected) == (code, str(error), True)
    assert (REQUEST_ID_KEY, "my-call") in status.metadata


@pytest.mark.parametrize("error", [RuntimeError("secret"), KeyError("secret"), AssertionError("secret")])
def test_other_errors_are_internal_without_their_text(error: Exception) -> None:
    status = status_of(error, "my-call")
    assert (status.code, status.is_expected) == (grpc.StatusCode.INTERNAL, False)
    assert "secret" not in status.message
    assert "my-call" in status.message


@pytest.mark.parametrize("text", ["x" * 1_000_000, "é\0\n" * 100_000])
def test_long_texts_are_cut_to_what_metadata_holds(text: str) -> None:
    for error in (CallError(grpc.StatusCode.INTERNAL, text), invalid("stop", text)):
        status = status_of(error, "my-call")
        assert len(status.message) < 3000
        assert sum(len(value) for _, value in status.metadata) < 20_000


@pytest.mark.parametrize("seconds", [0.25, 7.0])
def test_when_to_try_again_is_told_as_programs_read_it(seconds: float) -> None:
    status = status_of(worker_error(8, "full", seconds), "my-call")
    details = dict(status.metadata)["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    said, info = Status.FromString(details), RetryInfo()
    assert (said.code, said.message) == (8, "full")
    assert said.details[0].Unpack(info)
    assert info.retry_delay.ToTimedelta().total_seconds() == seconds
    assert "grpc-status-details-bin" not in dict(status_of(worker_error(8, "full"), "my-call").metadata)


def test_the_field_that_a_worker_refuses_is_told_as_programs_read_it() -> None:
    status = status_of(worker_error(3, "n: 99 outputs", field="n"), "my-call")
    assert unpack(dict(status.metadata)["grpc-status-details-bin"]).violations == (("n", "n: 99 outputs"),)


def test_a_workers_unknown_code_is_internal() -> None:
    assert worker_error(99, "?").code is grpc.StatusCode.INTERNAL
    assert worker_error(8, "full").code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_used_up_quota_tells_programs_whose_it_is_and_when_to_try_again() -> None:
    status = status_of(QuotaError("tenant acme", "tokens_per_minute", "5 of 4", 1.2341), "my-call")
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status.message == "limits.tokens_per_minute of tenant acme: 5 of 4; try again in 1.234 s"
    details = dict(status.metadata)["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    failure, info = QuotaFailure(), RetryInfo()
    first, second = Status.FromString(details).details
    assert first.Unpack(failure)
    assert second.Unpack(info)
    assert [violation.subject for violation in failure.violations] == ["tenant acme"]
    assert failure.violations[0].description == status.message
    # Rounded up: whoever comes back then is not too early.
    assert info.retry_delay.ToMilliseconds() == 1235
