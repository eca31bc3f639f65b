"""The worker holds each field of what a gateway sends to the field's row in the table, whatever the gateway checked."""

from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc import StatusCode

from prefixgate.proto import generation_pb2, worker_pb2
from prefixgate.proto.transport import CHANNEL_OPTIONS
from tests.breaking import broken
from tests.malformed import new_message
from tests.worker.driver import words
from tests.worker.hosting import Heard, Host, on_host

METHODS = [
    method
    for method in worker_pb2.DESCRIPTOR.services_by_name["Worker"].methods
    if not method.client_streaming and not method.server_streaming
]


def valid(method: MethodDescriptor) -> Any:
    request: Any = new_message(method.input_type)
    for name, value in (("tenant", "acme"), ("pin_id", "none"), ("ttl_seconds", 1.0)):
        if name in method.input_type.fields_by_name:
            setattr(request, name, value)
    prompt = getattr(request, "prompt", request)
    if "token_ids" in prompt.DESCRIPTOR.fields_by_name:
        prompt.tenant = "acme"
        prompt.token_ids[:] = words(20)
    return request


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_field_that_breaks_its_rule_is_refused_by_its_path(method: MethodDescriptor) -> None:
    async def scenario(host: Host) -> None:
        async with grpc.aio.insecure_channel(host.address, options=CHANNEL_OPTIONS) as channel:
            ask: Any = channel.unary_unary(f"/prefixgate.v1.Worker/{method.name}")
            for case in broken(valid(method)):
                call = ask(case.request.SerializeToString(), timeout=60)
                assert await call.code() is StatusCode.INVALID_ARGUMENT, str(case)
                assert (await call.details()).startswith(f"{case.path}: "), str(case)

    on_host(scenario)


def test_a_submit_with_a_field_that_breaks_its_rule_is_refused_by_its_path() -> None:
    submit = worker_pb2.Submit(call_id=1, tenant="acme", token_ids=words(20), n=1)
    submit.sampling.CopyFrom(generation_pb2.SamplingParams(max_tokens=4))

    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        for number, case in enumerate(broken(submit), 1):
            request: Any = case.request
            request.call_id = number
            await gateway.stream.write(worker_pb2.SessionRequest(submit=request))
            heard = gateway.calls.setdefault(number, Heard())
            await gateway.until(heard, ends=1)
            [end] = heard.ends
            assert end.code == StatusCode.INVALID_ARGUMENT.value[0], str(case)
            assert end.message.startswith(f"{case.path}: "), str(case)

    on_host(scenario)
