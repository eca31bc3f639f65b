"""The statuses that the gateway makes, read back by the client."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.gateway.client import errors
from prefixgate.gateway.client.errors import GatewayError, InvalidRequestError, OverloadedError, make_error
from prefixgate.gateway.errors import CallError, status_of
from prefixgate.proto.fields import invalid
from prefixgate.proto.transport import STATUS_DETAILS_KEY


def test_a_refused_field_is_told() -> None:
    status = status_of(invalid("sampling.top_p", "2 is out of range"), "r1")
    error = make_error(status.code, status.message, status.metadata)
    assert isinstance(error, InvalidRequestError)
    assert [violation.field for violation in error.field_violations] == ["sampling.top_p"]
    assert error.field_violations[0].description == "sampling.top_p: 2 is out of range"
    assert (error.request_id, error.retry_delay) == ("r1", None)
    assert str(error) == "INVALID_ARGUMENT: sampling.top_p: 2 is out of range"


def test_when_to_come_back_is_told() -> None:
    status = status_of(CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", 2.5), "r1")
    error = make_error(status.code, status.message, status.metadata)
    assert isinstance(error, OverloadedError)
    assert error.retry_delay == 2.5


@given(st.binary())
def test_details_that_are_not_ours_are_no_fault(data: bytes) -> None:
    error = make_error(grpc.StatusCode.UNAVAILABLE, "no", ((STATUS_DETAILS_KEY, data),))
    assert error.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_is_an_error_of_the_package(code: grpc.StatusCode) -> None:
    error = make_error(code, "why")
    assert isinstance(error, GatewayError)
    assert getattr(errors, type(error).__name__) is type(error)
