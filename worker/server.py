"""One worker process: listens, loads its model, serves, drains, ends."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from prefixgate.cache.accounts import TenantShare
from prefixgate.cache.adaptive import AdaptivePolicy
from prefixgate.cache.hashing import BlockHasher
from prefixgate.cache.lru import LRUPolicy
from prefixgate.cache.null_index import NullPrefixIndex
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.cache.prefix_index import PrefixIndex
from prefixgate.config.address import Address, parse_address
from prefixgate.config.settings import Settings, SettingsError
from prefixgate.proto import worker_pb2, worker_pb2_grpc
from prefixgate.proto.access import ACCESS_PURPOSE, AccessGuard
from prefixgate.proto.health import Health
from prefixgate.proto.http_server import Check, HttpServer
from prefixgate.proto.metrics_page import MetricsPage
from prefixgate.proto.pulse import Pulse
from prefixgate.proto.tls import ServerCertificates, ServerFiles, TlsError
from prefixgate.proto.transport import SERVER_OPTIONS
from prefixgate.worker.engine import Engine
from prefixgate.worker.engine_thread import EngineThread
from prefixgate.worker.limits import Limits
from prefixgate.worker.loader import load_runner, poisons
from prefixgate.worker.metrics import families
from prefixgate.worker.model_runner import ModelRunner
from prefixgate.worker.observations import Observations
from prefixgate.worker.readable import ReadableRequests
from prefixgate.worker.reading import Reading
from prefixgate.worker.report import EngineReport
from prefixgate.worker.service import SHUTTING_DOWN, ServedModel, WorkerService
from prefixgate.worker.socket_file import SocketFileError, claim_socket, private_files
from prefixgate.worker.step_watch import StepWatch
from prefixgate.worker.traces import open_traces
from prefixgate.worker.wire import describe

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCAL_TENANT = "local"
"""The one tenant where the settings name none."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LAST_STEP_SECONDS = 5.0
_LAST_WORDS_SECONDS = 2.0
_LAST_SPANS_SECONDS = 2.0


class ListenError(Exception):
    """An address cannot be listened on, and why."""


class WorkerServer:
    """Runs one worker from start to end, on the event loop of the main thread."""

    def __init__(self, settings: Settings, hash_key: bytes) -> None:
        """To be made on the event loop. Raises SettingsError for settings that do not go together."""
        self._settings = settings
        self._hasher = BlockHasher(hash_key)
        worker = settings.worker
        try:
            self._limits = Limits(worker.max_batch_tokens, worker.max_running, worker.max_waiting)
        except ValueError as error:
            raise SettingsError(f"worker.{error}") from error
        self._page = MetricsPage(worker.metrics_seconds)
        self._traces = open_traces(settings.tracing, f"{socket.gethostname()}:{os.getpid()}")
        self._service = WorkerService(self._traces.call_ended)
        self._health = Health(worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name)
        self._loop = asyncio.get_running_loop()
        self._engine: EngineThread | None = None
        self._report: Callable[[], EngineReport] | None = None
        self._is_ready = False
        self._is_stuck = False
        """Whether a step runs that is given up."""
        self._pulse = Pulse()
        self.http_port = 0
        """The port of the metrics page, once it is listened on."""
        self._asked_to_stop = asyncio.Event()
        self._hurried = asyncio.Event()
        self._failed = asyncio.Event()

    async def run(self) -> int:
        """Serve until asked to stop by a signal. Returns the exit code: 0 where nothing went wrong.

        The first signal drains: new calls are refused, live ones get their time. A second one ends them at once.
        Raises ListenError where an address cannot be had, and ModelRefusedError where the model cannot be served.
        """
        for number in _STOP_SIGNALS:
            self._loop.add_signal_handler(number, self.stop)
        http = self._open_http()
        beating = asyncio.create_task(self._pulse.run())
        try:
            server = await self._open_server()
            try:
                await self._work()
            finally:
                self._health.close()
                await self._end(server)
        finally:
            http.stop()
            beating.cancel()
            await asyncio.to_thread(self._traces.close, _LAST_SPANS_SECONDS)
        return 1 if self._failed.is_set() else 0

    async def _end(self, server: grpc.aio.Server) -> None:
        """Stop the server. The library waits for every call that anything still refers to, however long that is."""
        stopping = asyncio.create_task(server.stop(_LAST_WORDS_SECONDS))
        await asyncio.wait([stopping], timeout=2 * _LAST_WORDS_SECONDS)
        if not stopping.done():
            logger.error("The server did not stop within %g seconds and is left behind", 2 * _LAST_WORDS_SECONDS)

    async def _work(self) -> None:
        runner = await self._load()
        if runner is not None:
            await self._serve(runner)
            watching = asyncio.create_task(self._watch_steps())
            try:
                await _first_of(self._asked_to_stop.wait(), self._failed.wait())
                await self._drain()
            finally:
                watching.cancel()

    async def _watch_steps(self) -> None:
        """Fail where a step does not end: its calls would wait for ever, and nothing else would tell."""
        engine, seconds = self._engine, self._settings.worker.max_step_seconds
        assert engine is not None
        await StepWatch(lambda: engine.current_step, seconds).until_stuck()
        logger.critical(
            "A step has run for more than worker.max_step_seconds (%g); giving it up amid\n%s",
            seconds,
            engine.where(),
        )
        self._is_stuck = True
        self._failed.set()

    def stop(self) -> None:
        """Drain and end; called again, end at once."""
        if self._asked_to_stop.is_set():
            logger.warning("Asked again to stop: ending every call now")
            self._hurried.set()
        self._asked_to_stop.set()

    def _open_http(self) -> HttpServer:
        address = parse_address(self._settings.worker.http)
        checks = {"/healthz": self._liveness, "/readyz": self._readiness, "/busyz": self._room}
        try:
            http = HttpServer(address.host, address.port, self._page, checks)
        except OSError as error:
            raise ListenError(f"worker.http: {address} cannot be listened on: {error.strerror}") from error
        http.start()
        self.http_port = http.port
        logger.info("Metrics on http://%s/metrics", Address(address.host, http.port))
        return http

    # The three answers, each to a question of its own; asked on other threads.

    def _liveness(self) -> Check:
        """Whether to leave the process as it is: not to restart it because it loads, drains or has much to do."""
        if self._is_stuck:
            return Check(False, f"stuck: a step has run for more than {self._settings.worker.max_step_seconds:g} s")
        if self._failed.is_set():
            return Check(False, "dead: the engine failed")
        return Check(False, "stuck: the event loop does not turn") if self._pulse.is_stuck else Check(True, "alive")

    def _readiness(self) -> Check:
        """Whether to send calls here."""
        return Check(True, "ready") if self._is_ready else Check(False, "not ready: loading or shutting down")

    def _room(self) -> Check:
        """Whether a call would begin at once."""
        if self._report is None:
            return Check(True, "not busy: nothing runs yet")
        report = self._report()
        running, waiting = report.running_calls, report.waiting_calls
        return Check(not waiting, f"{'busy' if waiting else 'not busy'}: {running} calls run, {waiting} wait")

    async def _open_server(self) -> grpc.aio.Server:
        """Listen before the model is loaded, so that whoever waits for it can see that it comes."""
        server = grpc.aio.server(
            interceptors=[AccessGuard(self._hasher.derive(ACCESS_PURPOSE)), ReadableRequests()], options=SERVER_OPTIONS
        )
        self._health.tell(serving=False)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._service, server)
        address = parse_address(self._settings.worker.listen)
        try:
            if address.is_unix:
                claim_socket(Path(address.path))
            with private_files():
                port = self._bind(server, address)
                await server.start()
        except (SocketFileError, RuntimeError) as error:
            raise ListenError(f"worker.listen: {address} cannot be listened on: {error}") from error
        logger.info("Listening on %s", address if address.is_unix else Address(address.host, port))
        return server

    def _bind(self, server: grpc.aio.Server, address: Address) -> int:
        """Bind, by TLS where that is set up; a Unix socket's permissions do for it what TLS does for the network."""
        worker = self._settings.worker
        if worker.tls_cert and not address.is_unix:
            try:
                files = ServerFiles(worker.tls_cert, worker.tls_key, worker.tls_client_ca)
                return server.add_secure_port(str(address), ServerCertificates(files).credentials())
            except TlsError as error:
                raise SettingsError(f"worker.tls_cert: {error}") from error
        if not (address.is_local or worker.insecure_listen):
            raise SettingsError(
                f"worker.listen: {address} can be reached by other machines, and worker.tls_cert is not set: prompts, "
                "answers and the proof that makes a gateway one would travel in the clear. Set up TLS, or "
                "worker.insecure_listen = true where the network encrypts by itself"
            )
        return server.add_insecure_port(str(address))

    async def _load(self) -> ModelRunner | None:
        """Load the model on a thread of its own; None where the worker was asked to stop before it was there."""
        settings = self._settings
        loading = _on_daemon_thread(lambda: load_runner(settings.worker, settings.cache, logger.info))
        await _first_of(asyncio.wait([loading]), self._asked_to_stop.wait())
        return loading.result() if loading.done() else None

    async def _serve(self, runner: ModelRunner) -> None:
        settings, spec = self._settings, runner.spec
        cache = self._make_cache(runner.storage.num_blocks)
        observations = Observations(settings.tenants or [LOCAL_TENANT])
        engine = Engine(
            runner,
            cache,
            self._limits,
            observations,
            weights={name: tenant.weight for name, tenant in settings.tenants.items()},
            poison=poisons(settings.worker, settings.cache),
        )
        description = describe(
            spec,
            block_size=cache.block_size,
            max_call_blocks=max(map(cache.ceiling, observations.tenants)),
            hash_key_fingerprint=self._hasher.fingerprint,
            incarnation=secrets.token_hex(16),
        )
        self._engine = EngineThread(engine, self._engine_failed)
        self._report = engine.report
        self._engine.start()
        self._service.serve(
            ServedModel(spec, description, engine, observations, self._limits.max_running, cache.pins.limit)
        )
        self._page.show(lambda: families(Reading(observations, engine.report(), spec, engine.tenant_blocks())))
        self._health.tell(serving=True)
        self._is_ready = True
        logger.info("Serving %s with %d blocks of %d tokens", spec.name, cache.num_blocks, cache.block_size)

    def _make_cache(self, num_blocks: int) -> PrefixCache:
        """Share the pool out between the tenants. Raises SettingsError where it does not go round."""
        tenants = self._settings.tenants
        shares = {
            name: TenantShare(tenant.floor_blocks, tenant.cap_blocks, tenant.pin_cap_blocks)
            for name, tenant in tenants.items()
        }
        index = NullPrefixIndex if self._settings.cache.mode == "off" else PrefixIndex
        policy = LRUPolicy if self._settings.cache.eviction == "lru" else AdaptivePolicy
        try:
            return PrefixCache(
                num_blocks,
                self._hasher,
                shares=shares,
                # Where nothing can be found there is nothing to pin, and calls may have the whole pool.
                pin_limit=0 if index is NullPrefixIndex else int(num_blocks * self._settings.cache.pin_share),
                index=index,
                policy=policy,
            )
        except ValueError as error:
            raise SettingsError(f"tenants and cache.pin_share ({self._settings.cache.pin_share}): {error}") from error

    def _engine_failed(self) -> None:
        """Hear from the engine's thread that it is dead."""
        self._loop.call_soon_threadsafe(self._failed.set)

    async def _drain(self) -> None:
        """Let live calls finish, within bounds, then end what is left, and tell every gateway."""
        assert self._engine is not None
        self._is_ready = False
        self._service.drain()
        self._health.drain()
        seconds = self._settings.worker.drain_seconds
        if not self._failed.is_set():
            logger.info("Draining for at most %g seconds", seconds)
            await _first_of(self._hurried.wait(), self._failed.wait(), self._service.until_idle(), seconds=seconds)
        self._engine.stop(SHUTTING_DOWN)
        if not self._is_stuck and not await asyncio.to_thread(self._engine.join, _LAST_STEP_SECONDS):
            logger.error("The last step did not end within %g seconds", _LAST_STEP_SECONDS)
        try:
            await asyncio.wait_for(self._service.close(), _LAST_WORDS_SECONDS)
        except TimeoutError:
            logger.warning("A gateway did not read its last words")


async def _first_of(*waits: Coroutine[Any, Any, object], seconds: float | None = None) -> None:
    """Wait until one of several things has happened, or for so long."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _on_daemon_thread(compute: Callable[[], T]) -> asyncio.Future[T]:
    """Compute beside the event loop, on a thread that the process does not wait for when it ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[], None]) -> None:
        # The loop may be closed by now, and the future cancelled.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    def run() -> None:
        try:
            result = compute()
        except Exception as raised:
            error = raised
            tell(lambda: future.set_exception(error))
        else:
            tell(lambda: future.set_result(result))

    threading.Thread(target=run, name="loader", daemon=True).start()
    return future
