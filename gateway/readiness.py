"""Readiness: waits for a server to say that it serves."""

import asyncio
from http import HTTPStatus
from http.client import HTTPException
from urllib.request import ProxyHandler, build_opener

import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from prefixgate.gateway.errors import is_being_cancelled
from prefixgate.proto.transport import CHANNEL_OPTIONS, IN_THE_CLEAR

_RETRY_MS = 250
_ANSWER_SECONDS = 5.0
# A server that is still starting is no reason to back off for minutes, which is gRPC's default.
_EAGER = tuple((f"grpc.{name}_reconnect_backoff_ms", _RETRY_MS) for name in ("initial", "min", "max"))


async def until_page_ready(http_address: str) -> None:
    """Wait until the page /readyz at ``http_address`` says so.

    For a server whose own port may ask for certificates that are not at hand here.
    """
    url = f"http://{http_address}/readyz"
    while not await asyncio.to_thread(_answers, url):  # noqa: ASYNC110  # another process tells no event
        await asyncio.sleep(_RETRY_MS / 1000)


async def until_page_fails(http_address: str, *, pause: float = 5.0, failures: int = 12) -> None:
    """Wait until the page /healthz at ``http_address`` has not answered well so many times in a row.

    Not once: whoever is busy, or asked by many, may miss one. A process whose interpreter hangs misses all.
    """
    url, failed = f"http://{http_address}/healthz", 0
    while failed < failures:
        await asyncio.sleep(pause)
        failed = 0 if await asyncio.to_thread(_answers, url) else failed + 1


def _answers(url: str) -> bool:
    # Not by a proxy, whatever the environment says: the process is on this machine.
    direct = build_opener(ProxyHandler({}))
    try:
        with direct.open(url, timeout=_ANSWER_SECONDS) as response:
            return bool(response.status == HTTPStatus.OK)
    except (OSError, HTTPException):  # a status that is no success among them
        return False


async def until_serving(address: str) -> None:
    """Wait until the server at ``address`` listens and its standard health service says SERVING."""
    async with grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *_EAGER, *IN_THE_CLEAR]) as channel:
        # The library's stub would do, if its type hints knew this method.
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        while True:
            try:
                async for answer in watch(HealthCheckRequest(), wait_for_ready=True):
                    if answer.status == HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                # The server went away; whoever started it sees that, and may start it again.
                if is_being_cancelled():
                    raise asyncio.CancelledError from None
                await asyncio.sleep(_RETRY_MS / 1000)
