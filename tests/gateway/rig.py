"""A real gateway in this process, in front of a fake worker, and a client of it."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc.aio
from grpc_health.v1 import health_pb2

from prefixgate.cache.hashing import BlockHasher
from prefixgate.config.limit_settings import LimitSettings
from prefixgate.config.settings import GatewaySettings, Settings, TenantSettings
from prefixgate.gateway.call_trace import UNTRACED, Traces
from prefixgate.gateway.server import GatewayServer
from prefixgate.gateway.tenants import digest_api_key
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc
from prefixgate.proto.transport import CHANNEL_OPTIONS
from tests.gateway.fake_worker import HASH_KEY, FakeCall, FakeSession, FakeWorker, serving

T = TypeVar("T")
_LIMITS = {entry.name for entry in fields(LimitSettings)}
PATIENCE = 60.0
"""Seconds after which a test that hangs is given up."""


def run(test: Coroutine[Any, Any, T], *, patience: float = PATIENCE) -> T:
    """Run an async test, with a guard against hanging."""

    async def guarded() -> T:
        async with asyncio.timeout(patience):
            return await test

    return asyncio.run(guarded())


def tenants(**keys: str) -> dict[str, TenantSettings]:
    """Make tenants by name, each with one API key."""
    return {name: TenantSettings((digest_api_key(key.encode()),)) for name, key in keys.items()}


@dataclass
class Client:
    """A client of one gateway."""

    server: GatewayServer
    channel: grpc.aio.Channel
    stub: "gateway_pb2_grpc.GatewayAsyncStub"

    async def metrics(self) -> str:
        return (await self.get("/metrics"))[1]

    async def metric(self, sample: str) -> float:
        """Read one sample, named as on the page; 0 where it is not there."""
        values = [line.rpartition(" ") for line in (await self.metrics()).splitlines()]
        return next((float(value) for name, _, value in values if name == sample), 0.0)

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(http_get, f"http://{self.server.http_address}{path}")

    async def health(self, service: str = "") -> int:
        check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer: health_pb2.HealthCheckResponse = await check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)

    async def until_health(self, status: int) -> None:
        """Wait for a state of health by watching it."""
        watch = self.channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest())
        async for answer in watch:
            if answer.status == status:
                watch.cancel()
                return


@dataclass
class Rig(Client):
    """A client, and the worker behind the gateway."""

    worker: FakeWorker
    session: FakeSession
    """The gateway's first."""

    async def next_call(self) -> FakeCall:
        """Wait for the next call to reach the worker."""
        return await self.session.calls.get()


def http_get(url: str) -> tuple[int, str]:
    try:
        with urlopen(url, timeout=5) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


@asynccontextmanager
async def gateway(
    *worker_addresses: str,
    tenant_settings: Mapping[str, TenantSettings] | None = None,
    quota_clock: Callable[[], float] = time.monotonic,
    traces: Traces = UNTRACED,
    **settings: Any,
) -> AsyncIterator[GatewayServer]:
    """Run a gateway on free loopback ports. ``settings`` are keys of [gateway] and of [limits]."""
    limits = {name: settings.pop(name) for name in _LIMITS & settings.keys()}
    fresh = {"listen": "127.0.0.1:0", "http": "127.0.0.1:0", "metrics_seconds": 0.0}
    values = {**fresh, "workers": worker_addresses, **settings}
    server = GatewayServer(
        Settings(gateway=GatewaySettings(**values), limits=LimitSettings(**limits), tenants=tenant_settings or {}),
        BlockHasher(HASH_KEY),
        traces=traces,
        quota_clock=quota_clock,
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def gateway_client(
    server: GatewayServer, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[Client]:
    """Connect to a gateway, on a connection of its own."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    channel = (
        grpc.aio.secure_channel(str(server.address), credentials, options)
        if credentials is not None
        else grpc.aio.insecure_channel(str(server.address), options)
    )
    async with channel:
        yield Client(server, channel, gateway_pb2_grpc.GatewayStub(channel))


@asynccontextmanager
async def rig(
    worker: FakeWorker | None = None, *, credentials: grpc.ChannelCredentials | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    """Run everything, and wait until the gateway has found its worker.

    ``credentials`` are the client's; ``settings`` are those of ``gateway``.
    """
    worker = worker or FakeWorker()
    with tempfile.TemporaryDirectory() as folder:
        async with (
            serving(worker, Path(folder) / "worker.sock") as address,
            gateway(address, **settings) as server,
            gateway_client(server, credentials) as client,
        ):
            session = await worker.sessions.get()
            yield Rig(server, client.channel, client.stub, worker, session)


def prompt(text: str = "hi", **fields: Any) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(prompt=text, **fields)


def chat(*messages: tuple[str, str], **fields: Any) -> gateway_pb2.GenerateRequest:
    said = [gateway_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return gateway_pb2.GenerateRequest(chat=gateway_pb2.Chat(messages=said), **fields)


async def collect(stream: Any) -> list[gateway_pb2.GenerateResponse]:
    """Read a stream of Generate to its end."""
    return [response async for response in stream]


def text_of(responses: list[gateway_pb2.GenerateResponse], index: int = 0) -> str:
    return "".join(delta.text for response in responses for delta in response.deltas if delta.index == index)


def ids_of(responses: list[gateway_pb2.GenerateResponse], index: int = 0) -> list[int]:
    return [i for response in responses for delta in response.deltas if delta.index == index for i in delta.token_ids]
