"""The process: what answers in which state, how it drains, and what it does on ports that are taken."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from prefixgate.cache.hashing import BlockHasher
from prefixgate.config.cache_settings import CacheSettings
from prefixgate.config.hash_key import HASH_KEY_VARIABLE
from prefixgate.config.settings import GatewaySettings, Settings, SettingsError
from prefixgate.gateway.fleet import Fleet
from prefixgate.gateway.server import GatewayServer
from prefixgate.gateway.server import run as run_gateway
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc
from tests.gateway.fake_worker import HASH_KEY, FakeWorker, serving
from tests.gateway.rig import PATIENCE, Client, collect, gateway, gateway_client, ids_of, prompt, rig, run, tenants

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def code_of(pending: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pending
    return caught.value.code()


def test_pages_and_health_say_whether_there_is_a_worker(tmp_path: Path) -> None:
    async def test() -> None:
        async with gateway(f"unix:{tmp_path}/s") as server, gateway_client(server) as client:
            assert await client.health() == NOT_SERVING
            assert [(await client.get(path))[0] for path in ("/healthz", "/readyz", "/metrics")] == [200, 503, 200]
            assert await client.metric("prefixgate_gateway_worker_ready") == 0
            worker = FakeWorker()
            async with serving(worker, tmp_path / "s"):
                await client.until_health(SERVING)
                session = await worker.sessions.get()
                assert [(await client.get(path))[0] for path in ("/healthz", "/readyz?x=1", "/")] == [200, 200, 404]
                assert await client.metric("prefixgate_gateway_worker_ready") == 1
                pending = client.stub.Complete(prompt("hi"))
                call = await session.calls.get()
                assert await client.metric("prefixgate_gateway_live_calls") == 1
                assert await client.metric("prefixgate_gateway_oldest_call_seconds") > 0
                await call.finish([64])
                await pending
            await client.until_health(NOT_SERVING)
            assert await client.metric("prefixgate_gateway_live_calls") == 0

    run(test())


def test_a_drain_refuses_new_calls_and_lets_live_ones_finish() -> None:
    async def test() -> None:
        async with rig() as r:
            reading = asyncio.create_task(collect(r.stub.Generate(prompt("hi"))))
            call = await r.next_call()
            await call.send((0, [64]))
            stopping = asyncio.create_task(r.server.stop(60))
            await r.until_health(NOT_SERVING)
            assert await code_of(r.stub.Complete(prompt("hi"))) is grpc.StatusCode.UNAVAILABLE
            assert await code_of(r.stub.Stats(gateway_pb2.StatsRequest())) is grpc.StatusCode.UNAVAILABLE
            assert (await r.get("/readyz"))[0] == 503
            await call.finish([65])
            assert ids_of(await reading) == [64, 65]
            await stopping

    run(test())


def test_a_watch_of_health_does_not_hold_a_stop_up() -> None:
    async def test() -> None:
        async with rig() as r:
            watching = asyncio.create_task(r.until_health(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN))
            await r.health()
            await r.server.stop(3600)
            assert await code_of(watching) is grpc.StatusCode.UNAVAILABLE

    run(test())


def test_calls_that_outlast_the_drain_are_cut_off_with_a_status() -> None:
    async def test() -> None:
        async with rig() as r:
            reading = asyncio.create_task(collect(r.stub.Generate(prompt("hi"))))
            await r.next_call()
            await r.server.stop(0.05)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reading
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "the gateway is shutting down" in (caught.value.details() or "")
            assert "prefixgate-request-id" in dict(caught.value.trailing_metadata())
            # The stream's end cancels all that came through it.
            await r.session.closed.wait()

    run(test())


def test_a_client_that_reads_nothing_does_not_hold_a_stop_up() -> None:
    async def test() -> None:
        async with rig() as r:
            unread = r.stub.Generate(prompt("hi"))
            call = await r.next_call()
            for _ in range(100):
                await call.send((0, [64] * 1000))
            await r.server.stop(0.05)
            assert await code_of(collect(unread)) is grpc.StatusCode.UNAVAILABLE

    run(test())


def test_liveness_readiness_and_room_are_three_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async def answers(client: Client) -> list[int]:
            return [(await client.get(path))[0] for path in ("/healthz", "/readyz", "/busyz")]

        worker = FakeWorker()
        async with gateway(f"unix:{tmp_path}/s") as server, gateway_client(server) as client:
            assert await answers(client) == [200, 503, 200]
            assert [await client.health(name) for name in ("liveness", "readiness")] == [SERVING, NOT_SERVING]
            with monkeypatch.context() as patched:
                # As if the loop had not turned for that long.
                patched.setattr("prefixgate.proto.pulse.STUCK_SECONDS", -1.0)
                assert await answers(client) == [503, 503, 200]
            async with serving(worker, tmp_path / "s"):
                session = await worker.sessions.get()
                await client.until_health(SERVING)
                pending = client.stub.Generate(prompt("hi"))
                call = await session.calls.get()
                assert await answers(client) == [200, 200, 200]
                # As if it had waited for longer.
                monkeypatch.setattr("prefixgate.gateway.server.BUSY_SECONDS", 0.0)
                assert await answers(client) == [200, 200, 503]
                assert (await client.get("/busyz"))[1].startswith(
                    "busy: 1 calls, of which 1 wait for their first token"
                )
                assert await client.metric("prefixgate_gateway_waiting_calls") == 1
                assert await client.metric("prefixgate_gateway_longest_wait_seconds") > 0
                await call.send((0, [64]))
                await pending.read()
                assert await answers(client) == [200, 200, 200]
                assert await client.metric("prefixgate_gateway_waiting_calls") == 0
                stopping = asyncio.create_task(server.stop(60))
                await client.until_health(NOT_SERVING)
                assert await answers(client) == [200, 503, 200]
                assert [await client.health(name) for name in ("liveness", "readiness")] == [SERVING, NOT_SERVING]
                await call.finish([65])
                while await pending.read() is not grpc.aio.EOF:
                    pass
                await stopping

    run(test())


def test_a_port_that_is_taken_is_refused_by_its_setting() -> None:
    async def test() -> None:
        async with rig() as r:
            for name, taken in (("listen", r.server.address), ("http", r.server.http_address)):
                values: dict[str, Any] = {"listen": "127.0.0.1:0", "http": "127.0.0.1:0", "workers": ("unix:/none",)}
                values[name] = str(taken)
                with pytest.raises(SettingsError, match=f"gateway.{name}"):
                    GatewayServer(Settings(gateway=GatewaySettings(**values)), BlockHasher(HASH_KEY))

    run(test())


def test_without_tenants_other_machines_cannot_be_let_in() -> None:
    async def test() -> None:
        settings = GatewaySettings(listen="0.0.0.0:0", http="127.0.0.1:0", workers=("unix:/none",))
        with pytest.raises(SettingsError, match="tenants"):
            GatewayServer(Settings(gateway=settings), BlockHasher(HASH_KEY))

    run(test())


def test_a_gateway_listens_on_a_unix_socket_too(tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(listen=f"unix:{tmp_path}/gateway") as r:
            assert await r.health() == SERVING

    run(test())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_process_and_a_second_ends_it(number: signal.Signals, tmp_path: Path) -> None:
    """The real process: it outlives its stream after one signal, and not after two."""

    async def test() -> None:
        worker, address = FakeWorker(), f"unix:{tmp_path}/gateway"
        async with serving(worker, tmp_path / "worker") as worker_address:
            process = _start_gateway(address, worker_address)
            try:
                session = await worker.sessions.get()
                async with grpc.aio.insecure_channel(address) as channel:
                    stub: Any = gateway_pb2_grpc.GatewayStub(channel)
                    stream = stub.Generate(prompt("hi"), wait_for_ready=True)
                    call = await session.calls.get()
                    process.send_signal(number)
                    await _until_draining(stub)
                    await call.send((0, [64]))
                    assert ids_of([await stream.read()]) == [64]
                    process.send_signal(number)
                    assert await code_of(stream.read()) is grpc.StatusCode.UNAVAILABLE
                assert await asyncio.to_thread(process.wait, 10) == 0
            finally:
                process.kill()
                process.wait()

    run(test())


def _start_gateway(listen: str, worker: str) -> "subprocess.Popen[bytes]":
    flags = [f"--gateway-listen={listen}", "--gateway-http=127.0.0.1:0", f"--workers={worker}"]
    environment = os.environ | {"PREFIXGATE_HASH_KEY": HASH_KEY.hex()}
    return subprocess.Popen([sys.executable, "-m", "prefixgate.gateway", "gateway", *flags], env=environment)


async def _until_draining(stub: Any) -> None:
    """Ask until the answer is that the gateway shuts down; each question is answered at once."""
    while True:
        try:
            await stub.Tokenize(gateway_pb2.TokenizeRequest(prompt="hi"))
        except grpc.aio.AioRpcError as error:
            if "shutting down" in (error.details() or ""):
                return
            raise


def test_the_server_has_every_method_of_the_service() -> None:
    async def test() -> None:
        async with rig(tenant_settings=tenants(acme="key")) as r:
            for method in gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods:
                call: Any = r.channel.unary_unary(f"/{method.containing_service.full_name}/{method.name}")
                code = await code_of(call(b"\xff", metadata=(("authorization", "Bearer key"),)))
                assert code is grpc.StatusCode.INVALID_ARGUMENT

    run(test())


def test_what_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    make_server = grpc.aio.server

    def server_that_never_stops(*arguments: Any, **options: Any) -> grpc.aio.Server:
        server = make_server(*arguments, **options)
        stop_in_order = server.stop

        async def stop(_: float | None) -> None:
            await stop_in_order(None)
            await asyncio.Event().wait()

        server.stop = stop  # type: ignore[method-assign, assignment]
        return server

    async def follow(_: Fleet) -> None:
        # Deaf to the first cancel, as a library can make a task.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    monkeypatch.setattr(grpc.aio, "server", server_that_never_stops)
    monkeypatch.setattr(Fleet, "run", follow)

    async def test() -> None:
        async with gateway("unix:/none"):
            pass

    run(test())
    left = [record.getMessage() for record in caplog.records if "left behind" in record.getMessage()]
    assert len(left) == 2
    assert left[0].startswith("the server did not end")
    assert left[1].startswith("what follows the workers did not end")


ENDLESS_THREAD = """
import asyncio, sys, threading
from prefixgate.gateway.cli import main
from prefixgate.gateway.server import GatewayServer
start_in_order = GatewayServer.start
async def start(server):
    await start_in_order(server)
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    print("started", flush=True)
GatewayServer.start = start
sys.exit(main(["gateway", "--gateway-listen=127.0.0.1:0", "--gateway-http=127.0.0.1:0", "--workers=unix:/none"]))
"""
"""A thread that never ends, as one that waits for a name server can be."""


def test_a_thread_that_hangs_does_not_keep_the_process_from_ending() -> None:
    environment = {**os.environ, HASH_KEY_VARIABLE: HASH_KEY.hex()}
    command = [sys.executable, "-c", ENDLESS_THREAD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"started\n"
            process.terminate()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_a_gateway_that_can_follow_its_workers_no_more_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: Fleet) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Fleet, "run", fail)
    gateway = GatewaySettings(listen="127.0.0.1:0", http="127.0.0.1:0", workers=("unix:/none",))
    settings = Settings(gateway=gateway, cache=CacheSettings(hash_key=HASH_KEY.hex()))
    assert run_gateway(settings, None, lambda: settings) == 1
    assert "The gateway failed" in caplog.text
    assert "a fault of ours" in caplog.text
