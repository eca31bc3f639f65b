import asyncio
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from prefixgate.gateway.readiness import until_page_fails, until_page_ready, until_serving
from prefixgate.proto.transport import SERVER_OPTIONS

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
GUARD_SECONDS = 60.0


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


class ChannelWithoutServer:
    """A channel that takes a cancel for an end of the call, as a transport can that ends in the same moment."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def unary_stream(self, *_: object, **__: object) -> Callable[..., AsyncIterator[HealthCheckResponse]]:
        return self.watch

    async def watch(self, *_: object, **__: object) -> AsyncIterator[HealthCheckResponse]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata()) from None
        yield HealthCheckResponse()


def test_who_gives_up_waiting_is_let_go_whatever_the_transport_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda *_, **__: ChannelWithoutServer())

    async def scenario() -> None:
        waiting = asyncio.create_task(until_serving("unix:/none"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(asyncio.wait_for(scenario(), GUARD_SECONDS))


class Page:
    """A process's page, which says what the test wants and tells that it was asked."""

    def __init__(self) -> None:
        page = self
        self.is_well = False
        self.script: list[bool] = []
        """What is answered first."""
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = page.script.pop(0) if page.script else page.is_well
                self.send_response(200 if answer else 503)
                self.end_headers()
                page._asked.put(self.path)

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        # Bound and not listening yet: a port where nobody answers.
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self._server.server_bind()
        self.address = f"127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        self._server.server_activate()
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    async def asked(self) -> str:
        return await asyncio.to_thread(self._asked.get, timeout=GUARD_SECONDS)

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


def test_a_page_is_ready_when_it_says_so_and_not_before() -> None:
    async def scenario() -> None:
        page = Page()
        ready = asyncio.create_task(until_page_ready(page.address))
        page.start()
        assert await page.asked() == "/readyz"
        assert not ready.done()
        page.is_well = True
        await ready
        await page.stop()

    asyncio.run(asyncio.wait_for(scenario(), GUARD_SECONDS))


def test_a_page_is_asked_directly_whatever_proxy_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)

        async def scenario() -> None:
            page = Page()
            page.is_well = True
            page.start()
            await until_page_ready(page.address)
            await page.stop()

        asyncio.run(asyncio.wait_for(scenario(), GUARD_SECONDS))


def test_a_page_fails_when_it_has_done_so_several_times_in_a_row() -> None:
    async def scenario() -> None:
        page = Page()
        page.is_well = True
        page.script = [True, False, False, True, False, False, False]
        page.start()
        await until_page_fails(page.address, pause=0.0, failures=3)
        assert page.script == []
        assert [await page.asked() for _ in range(7)] == ["/healthz"] * 7
        await page.stop()

    asyncio.run(asyncio.wait_for(scenario(), GUARD_SECONDS))
