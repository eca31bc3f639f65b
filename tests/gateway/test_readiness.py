import asyncio
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from prefixgate.gateway.readiness import until_serving
from prefixgate.proto.transport import SERVER_OPTIONS

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
GUARD_SECONDS = 30.0


class WatchedHealth(health.aio.HealthServicer):
    """The library's health service, which also tells that somebody watches."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = asyncio.Event()

    async def Watch(self, request, context):  # type: ignore[no-untyped-def]
        self.watched.set()
        await super().Watch(request, context)


async def start(address: str, status: int) -> tuple[grpc.aio.Server, WatchedHealth]:
    servicer = WatchedHealth()
    await servicer.set("", status)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    return server, servicer


def test_a_server_is_ready_when_it_says_so_and_not_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        address = f"unix:{tmp_path}/a.sock"
        server, servicer = await start(address, NOT_SERVING)
        ready = asyncio.create_task(until_serving(address))
        await servicer.watched.wait()
        assert not ready.done()
        await servicer.set("", SERVING)
        await ready
        await server.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), GUARD_SECONDS))


def test_a_server_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        address = f"unix:{tmp_path}/a.sock"
        ready = asyncio.create_task(until_serving(address))
        # Whether its first try comes before the server or after, it must find it.
        await asyncio.sleep(0)
        server, _ = await start(address, SERVING)
        await ready
        await server.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), GUARD_SECONDS))


def test_a_server_that_goes_away_is_waited_for_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        address = f"unix:{tmp_path}/a.sock"
        first, servicer = await start(address, NOT_SERVING)
        ready = asyncio.create_task(until_serving(address))
        await servicer.watched.wait()
        await first.stop(None)
        assert not ready.done()
        second, _ = await start(address, SERVING)
        await ready
        await second.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), GUARD_SECONDS))
