"""Each method of the public API holds each field of its request to the field's row in the table."""

from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.rpc.error_details_pb2 import BadRequest  # type: ignore[import-untyped]
from grpc import StatusCode
from grpc_status import rpc_status

from prefixgate.proto import gateway_pb2
from tests.breaking import broken
from tests.gateway.rig import rig, run
from tests.malformed import inputs_of, valid_request

METHODS = list(gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods)


async def refusal(call: Any, *, streaming: bool) -> tuple[StatusCode, str]:
    """Tell how a call is refused, and for which field."""
    try:
        if streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # has what it needs
        violation = BadRequest()
        if status is not None and status.details and status.details[0].Unpack(violation):
            return error.code(), violation.field_violations[0].field
        return error.code(), error.details() or ""
    return StatusCode.OK, ""


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_field_that_breaks_its_rule_is_refused_by_its_path(method: MethodDescriptor) -> None:
    async def test() -> None:
        async with rig(max_prompt_bytes=1000) as r:
            make = r.channel.unary_stream if method.server_streaming else r.channel.unary_unary
            ask: Any = make(f"/prefixgate.v1.Gateway/{method.name}")
            for way in inputs_of(method.input_type):
                for case in broken(valid_request(method.input_type, way)):
                    call = ask(case.request.SerializeToString(), timeout=60)
                    found = await refusal(call, streaming=method.server_streaming)
                    assert found == (StatusCode.INVALID_ARGUMENT, case.path), str(case)

    run(test())
