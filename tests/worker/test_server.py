"""The life of a worker process: loading, serving, draining, ended."""

import asyncio
import contextlib
import os
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixgate.cache.hashing import BlockHasher
from prefixgate.cache.kv_storage import TorchKVStorage
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.config.cache_settings import CacheSettings
from prefixgate.config.settings import Settings, SettingsError, TenantSettings, WorkerSettings
from prefixgate.proto import worker_pb2, worker_pb2_grpc
from prefixgate.proto.access import ACCESS_PURPOSE, proving
from prefixgate.proto.transport import CHANNEL_OPTIONS
from prefixgate.worker import server
from prefixgate.worker.loader import Progress, load_runner
from prefixgate.worker.model_runner import ModelRefusedError, ModelRunner
from prefixgate.worker.server import ListenError, WorkerServer
from tests.worker.driver import words
from tests.worker.hosting import HANG_SECONDS, GatewaySide

KEY = bytes(16)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
OK: int = StatusCode.OK.value[0]
UNAVAILABLE: int = StatusCode.UNAVAILABLE.value[0]
INTERNAL: int = StatusCode.INTERNAL.value[0]


class Running:
    """A worker that runs on this event loop, and its ways in."""

    def __init__(self, subject: WorkerServer, listen: str, channel: grpc.aio.Channel) -> None:
        self.subject = subject
        self.listen = listen
        self.run = asyncio.create_task(subject.run())
        secret = BlockHasher(KEY).derive(ACCESS_PURPOSE)
        self.stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(proving(channel, secret))
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    async def check(self, service: str = "") -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await self.health.Check(request, wait_for_ready=True, timeout=HANG_SECONDS)
        return int(answer.status)

    async def until(self, status: int) -> None:
        """Wait for a state of health."""
        request = health_pb2.HealthCheckRequest(service="prefixgate.v1.Worker")
        watch = self.health.Watch(request, wait_for_ready=True, timeout=HANG_SECONDS)
        async for answer in watch:
            if answer.status == status:
                watch.cancel()
                return

    async def probe(self, path: str) -> int:
        def get() -> int:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.subject.http_port}{path}", timeout=30) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code

        return await asyncio.to_thread(get)

    async def gateway(self) -> GatewaySide:
        description = await self.stub.Describe(worker_pb2.DescribeRequest())
        return await GatewaySide(self.stub, description).open()

    async def end(self) -> int:
        async with asyncio.timeout(HANG_SECONDS):
            return await self.run


def settings(
    listen: str,
    *,
    model: str = "witness",
    cache_mode: str = "on",
    tenants: Mapping[str, TenantSettings] | None = None,
    **worker: Any,
) -> Settings:
    return Settings(
        worker=WorkerSettings(listen=listen, http=worker.pop("http", "127.0.0.1:0"), model=model, **worker),
        cache=CacheSettings(blocks=256, mode=cache_mode),
        tenants=tenants or {},
    )


@contextlib.asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Running]:
    with tempfile.TemporaryDirectory(prefix="pg-") as directory:
        listen = f"unix:{directory}/worker.sock"
        async with grpc.aio.insecure_channel(listen, options=CHANNEL_OPTIONS) as channel:
            worker = Running(WorkerServer(settings(listen, **options), KEY), listen, channel)
            try:
                yield worker
            finally:
                worker.subject.stop()
                worker.subject.stop()
                await asyncio.wait([worker.run], timeout=HANG_SECONDS)


def with_held_loader(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have models wait for an event before they are loaded."""
    release = threading.Event()

    def load(worker: WorkerSettings, cache: CacheSettings, progress: Progress) -> ModelRunner:
        assert release.wait(HANG_SECONDS)
        return load_runner(worker, cache, progress)

    monkeypatch.setattr(server, "load_runner", load)
    return release


def test_health_follows_a_worker_from_loading_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    release = with_held_loader(monkeypatch)

    async def scenario() -> None:
        async with running(model="witness:step_ms=1") as worker:
            assert await worker.check() == await worker.check("prefixgate.v1.Worker") == NOT_SERVING
            assert [await worker.probe(path) for path in ("/healthz", "/readyz", "/metrics")] == [200, 503, 200]
            with pytest.raises(grpc.aio.AioRpcError, match="the model is loading"):
                await worker.gateway()
            release.set()
            await worker.until(SERVING)
            assert [await worker.probe(path) for path in ("/healthz", "/readyz", "/metrics")] == [200, 200, 200]
            with monkeypatch.context() as patched:
                # As if the loop had not turned for that long.
                patched.setattr("prefixgate.proto.pulse.STUCK_SECONDS", -1.0)
                assert [await worker.probe(path) for path in ("/healthz", "/readyz")] == [503, 200]
            gateway = await worker.gateway()
            live = await gateway.submit(1, words(20), 200)
            await gateway.until(live, tokens=1)
            worker.subject.stop()
            await worker.until(NOT_SERVING)
            assert [await worker.probe(path) for path in ("/healthz", "/readyz")] == [200, 503]
            late = await gateway.submit(2, words(20))
            await gateway.until(late, ends=1)
            assert late.codes == [UNAVAILABLE]
            assert await worker.end() == 0
            await gateway.until(live, ends=1)
            assert (live.codes, len(live.outputs[0])) == ([OK], 200)
            assert (await gateway.status())[0] is StatusCode.UNAVAILABLE

    asyncio.run(scenario())


def test_a_worker_asked_to_stop_while_it_loads_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    release = with_held_loader(monkeypatch)

    async def scenario() -> None:
        async with running() as worker:
            await worker.check()
            worker.subject.stop()
            assert await worker.end() == 0
        release.set()

    asyncio.run(scenario())


@pytest.mark.parametrize("hurry", ["asked again", "out of time"])
def test_calls_that_cannot_finish_end_with_a_status(hurry: str) -> None:
    async def scenario() -> None:
        async with running(drain_seconds=0.0 if hurry == "out of time" else 600.0, max_running=1) as worker:
            await worker.until(SERVING)
            gateway = await worker.gateway()
            calls = [await gateway.submit(call_id, words(20), 3000) for call_id in range(3)]
            await gateway.until(calls[0], tokens=1)
            worker.subject.stop()
            if hurry == "asked again":
                await worker.until(NOT_SERVING)
                worker.subject.stop()
            assert await worker.end() == 0
            for heard in calls:
                await gateway.until(heard, ends=1)
            assert [heard.codes for heard in calls] == [[UNAVAILABLE]] * 3
            assert calls[0].ends[0].usage.completion_tokens == len(calls[0].outputs[0])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("part", "name"), [(TorchKVStorage, "poison"), (PrefixCache, "writable"), (PrefixCache, "publish")]
)
def test_a_dead_engine_ends_its_calls_and_the_process(
    part: type[object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the device fell off the bus")

    async def scenario() -> None:
        async with running() as worker:
            await worker.until(SERVING)
            gateway = await worker.gateway()
            live = await gateway.submit(1, words(20), 3000)
            await gateway.until(live, tokens=1)
            watch = aiter(worker.health.Watch(health_pb2.HealthCheckRequest()))
            assert (await anext(watch)).status == SERVING
            monkeypatch.setattr(part, name, broken)
            await gateway.until(live, ends=1)
            assert live.codes == [INTERNAL]
            assert (await anext(watch)).status == NOT_SERVING
            assert await worker.end() == 1

    asyncio.run(scenario())


def test_a_step_that_does_not_end_ends_the_calls_and_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, release = threading.Event(), threading.Event()

    def hangs(*_: object) -> None:
        hanging.set()
        assert release.wait(HANG_SECONDS)

    async def scenario() -> None:
        async with running(max_step_seconds=1.0) as worker:
            await worker.until(SERVING)
            gateway = await worker.gateway()
            monkeypatch.setattr(TorchKVStorage, "poison", hangs)
            await gateway.submit(1, words(20))
            assert await asyncio.to_thread(hanging.wait, HANG_SECONDS)
            # The engine would answer it.
            explaining = worker.stub.Explain(worker_pb2.CachedPrompt(tenant="acme", token_ids=words(20)))
            await worker.until(NOT_SERVING)
            assert await worker.probe("/healthz") == 503
            assert (await gateway.status())[0] is StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await explaining
            assert refused.value.code() is StatusCode.UNAVAILABLE
            assert await worker.end() == 1

    try:
        asyncio.run(scenario())
    finally:
        release.set()
    (complaint,) = [record.getMessage() for record in caplog.records if "max_step_seconds" in record.getMessage()]
    assert "in hangs" in complaint, "the log tells where it hangs"


def test_an_endless_watch_does_not_keep_a_worker_from_ending() -> None:
    async def scenario() -> None:
        async with running() as worker:
            watch = worker.health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            assert (await anext(aiter(watch))).status in (NOT_SERVING, SERVING)
            await worker.until(SERVING)
            worker.subject.stop()
            assert await worker.end() == 0
            with pytest.raises(grpc.aio.AioRpcError):
                await read_to_the_end(watch)

    async def read_to_the_end(stream: AsyncIterator[object]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            async for _ in stream:
                pass

    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["listen", "http", "tcp listen"])
def test_an_address_in_use_is_refused_by_its_settings_name(what: str) -> None:
    async def scenario() -> None:
        async with running() as worker:
            await worker.until(SERVING)
            http = f"127.0.0.1:{worker.subject.http_port}"
            listen = {"listen": worker.listen, "http": worker.listen + "2", "tcp listen": http}[what]
            second = WorkerServer(settings(listen, http=http if what == "http" else "127.0.0.1:0"), KEY)
            with pytest.raises(ListenError, match=f"worker.{what.split()[-1]}: "):
                await second.run()
            assert await worker.check() == SERVING, "the first one is still reached"

    asyncio.run(scenario())


def test_a_worker_does_not_listen_where_others_could_read_along_unless_it_is_told_to() -> None:
    async def scenario() -> None:
        with pytest.raises(SettingsError, match=r"worker\.listen: 0\.0\.0\.0:0 .*insecure_listen"):
            await WorkerServer(settings("0.0.0.0:0"), KEY).run()
        told = WorkerServer(settings("0.0.0.0:0", insecure_listen=True), KEY)
        running = asyncio.create_task(told.run())
        # Whether it has listened by then or not, it does not refuse.
        told.stop()
        async with asyncio.timeout(HANG_SECONDS):
            assert await running == 0

    asyncio.run(scenario())


def test_a_model_that_is_refused_ends_the_worker_with_the_reason() -> None:
    async def scenario() -> None:
        async with running(model="witness:eos_evry=3") as worker:
            with pytest.raises(ModelRefusedError, match="no option 'eos_evry'"):
                await worker.end()

    asyncio.run(scenario())


def test_floors_that_leave_nothing_of_the_pool_end_the_worker_with_the_numbers() -> None:
    async def scenario() -> None:
        tenants = {"a": TenantSettings(floor_blocks=200), "b": TenantSettings(floor_blocks=56)}
        async with running(tenants=tenants) as worker:
            numbers = (
                r"cache\.pin_share \(0\.1\): .*floors \(256 blocks\).*pin limit \(25 blocks\).*pool \(256 blocks\)"
            )
            with pytest.raises(SettingsError, match=numbers):
                await worker.end()

    asyncio.run(scenario())


@pytest.mark.parametrize(("cache_mode", "hit"), [("on", 39), ("off", 0)])
def test_the_cache_can_be_turned_off_to_see_what_it_is_worth(cache_mode: str, hit: int) -> None:
    async def scenario() -> None:
        async with running(cache_mode=cache_mode) as worker:
            await worker.until(SERVING)
            gateway = await worker.gateway()
            cached = []
            for call in (1, 2):
                heard = await gateway.submit(call, words(40), 1)
                await gateway.until(heard, ends=1)
                cached.append(heard.ends[0].usage.cached_tokens)
            assert cached == [0, hit]

    asyncio.run(scenario())


@pytest.mark.parametrize(("cache_mode", "pinnable"), [("on", 25), ("off", 0)])
def test_what_pins_may_hold_is_kept_from_single_calls(cache_mode: str, pinnable: int) -> None:
    async def scenario() -> None:
        async with running(cache_mode=cache_mode) as worker:
            await worker.until(SERVING)
            pool = (await worker.stub.Report(worker_pb2.ReportRequest())).pool
            assert (pool.block_size, pool.total_blocks, pool.pin_limit_blocks) == (16, 256, pinnable)
            description = await worker.stub.Describe(worker_pb2.DescribeRequest())
            assert description.max_call_tokens == (256 - pinnable) * 16

    asyncio.run(scenario())


def test_limits_that_do_not_go_together_are_refused_by_name() -> None:
    async def scenario() -> None:
        with pytest.raises(SettingsError, match=r"worker\.max_batch_tokens: 64 must be more than max_running, 64"):
            WorkerServer(settings("unix:/tmp/unused.sock", max_batch_tokens=64), KEY)

    asyncio.run(scenario())


def test_the_socket_is_the_owners_alone_and_gone_at_the_end() -> None:
    async def scenario() -> None:
        async with running() as worker:
            await worker.until(SERVING)
            path = worker.listen.removeprefix("unix:")
            assert os.stat(path).st_mode & 0o777 == 0o600
            worker.subject.stop()
            await worker.end()
            assert not os.access(path, os.F_OK)

    asyncio.run(scenario())


def test_metrics_of_the_engine_are_on_the_page_and_tenants_come_from_the_settings() -> None:
    async def scenario() -> None:
        async with running() as worker:
            await worker.until(SERVING)
            gateway = await worker.gateway()
            await gateway.until(await gateway.submit(1, words(20), 5, tenant="local"), ends=1)

            def scrape() -> str:
                url = f"http://127.0.0.1:{worker.subject.http_port}/metrics"
                with urllib.request.urlopen(url, timeout=30) as answer:
                    return str(answer.read().decode())

            page = await asyncio.to_thread(scrape)
            assert 'prefixgate_worker_queried_tokens_total{tenant="local"} 20\n' in page
            assert 'vllm:generation_tokens_total{engine="0",model_name="witness"} 5\n' in page

    asyncio.run(scenario())
