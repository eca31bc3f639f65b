"""Bytes that are no message: INVALID_ARGUMENT from every method, and streams beside it go on."""

from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc import StatusCode

from prefixgate.proto import worker_pb2
from prefixgate.proto.transport import CHANNEL_OPTIONS
from tests.worker.driver import words
from tests.worker.hosting import Host, on_host

METHODS = list(worker_pb2.DESCRIPTOR.services_by_name["Worker"].methods)
NO_MESSAGE = b"\x0a\x02\xed\xa0"
"""A field of two bytes that are half a surrogate: no text, and no message of any kind."""


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_bytes_that_are_no_message_are_the_gateways_fault(method: MethodDescriptor) -> None:
    async def scenario(host: Host) -> None:
        beside = await host.gateway()
        live = await beside.submit(1, words(20), 200)
        async with grpc.aio.insecure_channel(host.address, options=CHANNEL_OPTIONS) as channel:
            # On the wire all kinds of method are the same.
            call: Any = channel.stream_stream(f"/prefixgate.v1.Worker/{method.name}")(timeout=60)
            await call.write(b"\xff" * 8 if not method.input_type.fields else NO_MESSAGE + b"\xff")
            await call.done_writing()
            assert await call.code() is StatusCode.INVALID_ARGUMENT
            assert (await call.details()).startswith("the request cannot be read: ")
        await beside.until(live, ends=1)
        assert len(live.outputs[0]) == 200

    on_host(scenario)
