"""Thousands of requests that nobody should send, by every method: each is refused by name or answered, and nobody
beside them notices."""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest  # type: ignore[import-untyped]
from grpc import StatusCode
from grpc_status import rpc_status

from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, generation_pb2
from prefixgate.proto.transport import CHANNEL_OPTIONS
from prefixgate.worker.witness_options import WitnessOptions
from tests.integration.asking import prompt
from tests.integration.oracle import Oracle
from tests.integration.sidecar import KEYS, Sidecar, credential
from tests.integration.waiting import HANG_SECONDS
from tests.malformed import Malformer, inputs_of, is_path, new_message, valid_request

METHODS = list(gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods)
ALLOWED = {
    *(StatusCode.OK, StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND),
    *(StatusCode.UNIMPLEMENTED, StatusCode.RESOURCE_EXHAUSTED),
}
ALLOWED_OF = {"Pin": ALLOWED | {StatusCode.FAILED_PRECONDITION}}
"""Nothing of a prompt may be cached."""
AT_ONCE = 25
MAX_TOKENS = 12


class Ended(NamedTuple):
    """What came of a request."""

    method: MethodDescriptor
    data: bytes
    code: StatusCode
    details: str
    field: str
    """The field that the status names; empty where it names none."""
    last: Message | None

    def __str__(self) -> str:
        return f"{self.method.name}({self.data[:300]!r}): {self.code.name} {self.details[:300]} [{self.field}]"


def requests(rng: random.Random) -> Iterator[tuple[MethodDescriptor, bytes]]:
    malformer = Malformer(rng)
    while True:
        # Half of all go to the two methods with most fields.
        method = rng.choice(METHODS if rng.random() < 0.5 else METHODS[:2])
        yield method, malformer.request(valid_request(method.input_type, rng.choice(inputs_of(method.input_type))))


async def send(channel: grpc.aio.Channel, method: MethodDescriptor, data: bytes, tenant: str) -> Ended:
    """Send bytes as a request, and read all that comes."""
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    read = type(new_message(method.output_type)).FromString
    ask: Any = make(f"/prefixgate.v1.Gateway/{method.name}", response_deserializer=read)
    call = ask(data, metadata=credential(tenant), timeout=HANG_SECONDS)
    last, details, field = None, "", ""
    try:
        if method.server_streaming:
            async for message in call:
                last = message
        else:
            last = await call
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # has what it needs
        violation = BadRequest()
        if status is not None and status.details and status.details[0].Unpack(violation):
            field = violation.field_violations[0].field
    return Ended(method, data, await call.code(), details, field, last)


def check(ended: Ended) -> None:
    """Check that a request was refused by name, or answered to the end."""
    assert ended.code in ALLOWED_OF.get(ended.method.name, ALLOWED), str(ended)
    if ended.code is StatusCode.INVALID_ARGUMENT:
        unread = ended.details.startswith("the request cannot be read")
        assert unread or is_path(ended.method.input_type, ended.field), str(ended)
        assert unread or ended.details.startswith(f"{ended.field}: "), str(ended)
        assert len(ended.details) < 2100, str(ended)
    elif ended.code is StatusCode.OK:
        assert ended.last is not None, str(ended)
        if "completion" in ended.method.output_type.fields_by_name:
            assert ended.last.HasField("completion"), str(ended)


async def ask_beside(channel: grpc.aio.Channel, request: gateway_pb2.GenerateRequest, tenant: str) -> list[int]:
    stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)
    metadata = grpc.aio.Metadata(*credential(tenant))
    answer = await stub.Complete(request, metadata=metadata, timeout=HANG_SECONDS)
    assert answer.outputs[0].finish_reason == generation_pb2.FINISH_REASON_LENGTH
    return list(answer.outputs[0].token_ids)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A server of its own, as its cache is flushed and its pool filled."""
    folder: Path = tmp_path_factory.mktemp("malformed")
    with Sidecar(folder, "--default-max-tokens=8") as served:
        served.wait_until_ready()
        yield served
        assert served.stop() == 0
        assert served.complaints() == []


def test_every_malformed_request_is_refused_by_name_or_answered(target: Sidecar, scaled: Callable[[int], int]) -> None:
    rng, oracle = random.Random(5), Oracle(WitnessOptions(), longest=100)
    neighbour = prompt("a neighbour whose prompt is a few blocks long and stays the same", MAX_TOKENS)
    expected = {tenant: oracle.output(neighbour, tenant, 0) for tenant in KEYS}
    tenants = itertools.cycle(KEYS)

    async def test() -> list[Ended]:
        found = list[Ended]()
        async with grpc.aio.insecure_channel(target.address, options=CHANNEL_OPTIONS) as channel:
            source = requests(rng)
            for _ in range(scaled(5000) // AT_ONCE):
                tenant = next(tenants)
                beside = asyncio.create_task(ask_beside(channel, neighbour, tenant))
                batch = [send(channel, *next(source), next(tenants)) for _ in range(AT_ONCE)]
                found += await asyncio.gather(*batch)
                answer = expected[tenant]
                assert answer is not None
                assert await beside == answer.token_ids
        return found

    found = asyncio.run(test())
    for ended in found:
        check(ended)
    kinds = {ended.code for ended in found}
    assert kinds >= {StatusCode.OK, StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND}, f"of one kind only: {kinds}"
    refused = {ended.field for ended in found}
    assert len(refused) > 15, f"too few fields were refused: {refused}"
    target.until_idle()
