"""Thousands of messages that no gateway sends, straight to the worker: the call ends with a status, or its stream
does; calls beside it are answered as if alone."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from grpc import StatusCode

from prefixgate.proto import generation_pb2, worker_pb2
from prefixgate.proto.transport import CHANNEL_OPTIONS, PROTOCOL_VERSION
from tests.malformed import Malformer, new_message
from tests.worker.driver import solo, words
from tests.worker.hosting import HANG_SECONDS, Host, on_host

CODES = {code.value[0]: code for code in StatusCode}
OF_CALLS = {
    *(StatusCode.OK, StatusCode.INVALID_ARGUMENT, StatusCode.UNIMPLEMENTED),
    # A call can be too large for this pool, or have next to no time.
    *(StatusCode.RESOURCE_EXHAUSTED, StatusCode.DEADLINE_EXCEEDED),
}
OF_STREAMS = {StatusCode.OK, StatusCode.FAILED_PRECONDITION, StatusCode.INVALID_ARGUMENT}
OF_METHODS = OF_CALLS | {StatusCode.NOT_FOUND, StatusCode.FAILED_PRECONDITION}
METHODS = [
    method
    for method in worker_pb2.DESCRIPTOR.services_by_name["Worker"].methods
    if not method.client_streaming and not method.server_streaming
]
AT_ONCE = 10


def valid_submit() -> worker_pb2.SessionRequest:
    sampling = generation_pb2.SamplingParams(max_tokens=4)
    submit = worker_pb2.Submit(call_id=1, tenant="acme", token_ids=words(20), n=1, sampling=sampling)
    return worker_pb2.SessionRequest(submit=submit)


def hello(host: Host) -> bytes:
    description = host.model.description
    said = worker_pb2.Hello(
        gateway="test",
        protocol_version=PROTOCOL_VERSION,
        incarnation=description.incarnation,
        hash_key_fingerprint=description.hash_key_fingerprint,
    )
    return worker_pb2.SessionRequest(hello=said).SerializeToString()


def starts_a_call(data: bytes) -> bool:
    try:
        return worker_pb2.SessionRequest.FromString(data).HasField("submit")
    except DecodeError:
        return False


async def send(channel: grpc.aio.Channel, host: Host, data: bytes) -> str:
    """Open a stream as a gateway does, send bytes as its one message, and tell what ended wrongly, if anything did."""
    path: Any = "/prefixgate.v1.Worker/Session"
    make: Any = channel.stream_stream(path, response_deserializer=worker_pb2.StepMessage.FromString)
    stream = make(timeout=HANG_SECONDS)
    ends: list[StatusCode] = []
    try:
        await stream.write(hello(host))
        await stream.write(data)
        if starts_a_call(data):
            while not ends:
                events = (await stream.read()).events
                ends += [CODES[event.end.code] for event in events if event.HasField("end")]
        await stream.done_writing()
    except grpc.aio.AioRpcError:
        pass  # its status tells
    code = await stream.code()
    good = code in OF_STREAMS and set(ends) <= OF_CALLS and bool(ends) == starts_a_call(data)
    return "" if good else f"{data[:300]!r}: {code} {await stream.details()} {ends}"


def test_every_malformed_message_of_a_stream_ends_it_or_its_call_and_hurts_nobody(
    scaled: Callable[[int], int], caplog: pytest.LogCaptureFixture
) -> None:
    malformer, prompt = Malformer(random.Random(7)), words(40)
    alone = solo(prompt, 8)

    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        async with grpc.aio.insecure_channel(host.address, options=CHANNEL_OPTIONS) as channel:
            for number in range(scaled(5000) // AT_ONCE):
                beside = await gateway.submit(number, prompt, 8)
                messages = [malformer.request(valid_submit()) for _ in range(AT_ONCE)]
                found = await asyncio.gather(*(send(channel, host, data) for data in messages))
                assert [fault for fault in found if fault] == []
                await gateway.until(beside, ends=1)
                assert beside.outputs == alone
        await host.until_idle()

    on_host(scenario)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_malformed_request_of_a_method_ends_with_a_status(
    method: Any, scaled: Callable[[int], int], caplog: pytest.LogCaptureFixture
) -> None:
    malformer, valid = Malformer(random.Random(8)), new_message(method.input_type)

    async def scenario(host: Host) -> None:
        async with grpc.aio.insecure_channel(host.address, options=CHANNEL_OPTIONS) as channel:
            ask: Any = channel.unary_unary(f"/prefixgate.v1.Worker/{method.name}")
            for _ in range(scaled(1000)):
                data = malformer.request(valid)
                call = ask(data, timeout=HANG_SECONDS)
                assert await call.code() in OF_METHODS, f"{data[:300]!r}: {await call.code()} {await call.details()}"

    on_host(scenario)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
