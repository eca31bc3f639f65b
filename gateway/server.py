"""The gateway process: what it is made of, and how it starts, serves and stops."""

import asyncio
import logging
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import grpc.aio
import prometheus_client
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prefixgate.cache.hashing import BlockHasher
from prefixgate.config.address import Address, parse_address
from prefixgate.config.hash_key import require_hash_key
from prefixgate.config.settings import Settings, SettingsError
from prefixgate.gateway.auth import Authenticator
from prefixgate.gateway.call_boundary import CallBoundary
from prefixgate.gateway.call_guard import CallGuard
from prefixgate.gateway.generation import Generator
from prefixgate.gateway.http_server import HttpServer
from prefixgate.gateway.live_calls import LiveCalls
from prefixgate.gateway.metrics import LIVE_CALLS, OLDEST_CALL, WORKER_READY, GatewayMetrics
from prefixgate.gateway.prompt_encoder import PromptEncoder
from prefixgate.gateway.service import GatewayService
from prefixgate.gateway.tenants import LOCAL_TENANT
from prefixgate.gateway.validation import Limits
from prefixgate.gateway.worker_client import WorkerClient
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc
from prefixgate.proto.transport import SERVER_OPTIONS

logger = logging.getLogger(__name__)

SERVICE_NAME: str = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name

_HEALTH_NAMES = ("", SERVICE_NAME)
_LAST_WORDS_SECONDS = 1.0
"""For statuses on their way when all calls have ended. Whoever still watches health is cut off then: a watch never
ends by itself, and would use up all of the time to drain."""
_MAX_ENCODING_THREADS = 4


class GatewayServer:
    """One gateway, in the event loop that it is made in."""

    def __init__(self, settings: Settings, *, hash_key_fingerprint: bytes) -> None:
        """Bind both ports. Raises SettingsError for what cannot be used, such as a port that is taken."""
        gateway = settings.gateway
        listen = parse_address(gateway.listen)
        limits = Limits(gateway.default_max_tokens, gateway.max_outputs, gateway.max_prompt_bytes)
        authenticator = Authenticator(settings.tenants, local_allowed=listen.is_local)
        self._live = LiveCalls()
        self._is_draining = False
        self._health = health.aio.HealthServicer()
        self._worker = WorkerClient(
            gateway.worker,
            hash_key_fingerprint=hash_key_fingerprint,
            gateway_name=f"{socket.gethostname()}:{os.getpid()}"[:128],
            on_change=self._set_health,
        )
        registry = prometheus_client.CollectorRegistry()
        metrics = GatewayMetrics(
            registry,
            settings.tenants or (LOCAL_TENANT,),
            {
                LIVE_CALLS: lambda: self._live.num_live,
                OLDEST_CALL: lambda: self._live.oldest_seconds,
                WORKER_READY: lambda: self._worker.is_ready,
            },
        )
        self._threads = ThreadPoolExecutor(min(_MAX_ENCODING_THREADS, os.cpu_count() or 1), "encode")
        encoder = PromptEncoder(self._threads, metrics, max_prompt_bytes=limits.max_prompt_bytes)
        guard = CallGuard(authenticator.authenticate, metrics)
        service = GatewayService(
            CallBoundary(self._live, metrics, guard.tenant),
            Generator(lambda: self._worker.connection, encoder, metrics, limits),
            encoder,
            self._worker,
            limits,
        )
        self._server = grpc.aio.server(interceptors=[guard], options=SERVER_OPTIONS)
        gateway_pb2_grpc.add_GatewayServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.address = _bind(self._server, listen)
        try:
            self._http = HttpServer(parse_address(gateway.http), registry, lambda: self.is_ready)
        except OSError as error:
            raise SettingsError(f"gateway.http: cannot listen on {gateway.http}: {error.strerror}") from error
        self._worker_task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether calls are served now. May be read from other threads."""
        return self._worker.is_ready and not self._is_draining

    @property
    def http_address(self) -> Address:
        """Where metrics are served."""
        return self._http.address

    async def start(self) -> None:
        """Serve from now on; health says SERVING once a worker is found."""
        await self._set_health(False)
        self._worker_task = asyncio.create_task(self._worker.run())
        await self._server.start()
        self._http.start()
        logger.info("Serving on %s, metrics on http://%s/metrics", self.address, self.http_address)

    async def stop(self, drain_seconds: float) -> None:
        """Take no new calls, let live ones finish within ``drain_seconds``, and end everything. Only after ``start``.

        When cancelled while it waits, what is left is cut off at once.
        """
        self._is_draining = True
        try:
            await self._health.enter_graceful_shutdown()
            await self._live.drain(drain_seconds)
        finally:
            await self._server.stop(0 if self._live.num_live else _LAST_WORDS_SECONDS)
            if self._worker_task is not None:
                self._worker_task.cancel()
                await asyncio.wait([self._worker_task])
            await asyncio.to_thread(self._http.stop)
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _set_health(self, is_serving: bool) -> None:
        state = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in _HEALTH_NAMES:
            await self._health.set(name, state)


def _bind(server: grpc.aio.Server, listen: Address) -> Address:
    try:
        port = server.add_insecure_port(str(listen))
    except RuntimeError as error:
        raise SettingsError(f"gateway.listen: cannot listen on {listen}; is the address taken?") from error
    return listen if listen.is_unix else Address(host=listen.host, port=port)


def run(settings: Settings) -> int:
    """Run a gateway until SIGTERM or SIGINT, and return the process's exit code.

    Live calls then finish within ``gateway.drain_seconds``; a second signal ends them. Raises SettingsError.
    """
    fingerprint = BlockHasher(require_hash_key(settings.cache)).fingerprint
    # The times at which counters began are no use to anybody, and double the page.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    return asyncio.run(_run(settings, fingerprint))


async def _run(settings: Settings, hash_key_fingerprint: bytes) -> int:
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    server = GatewayServer(settings, hash_key_fingerprint=hash_key_fingerprint)
    await server.start()
    logger.info("%s: shutting down", signal.Signals(await signals.get()).name)
    stopping = asyncio.create_task(server.stop(settings.gateway.drain_seconds))
    second = asyncio.create_task(signals.get())
    await asyncio.wait({stopping, second}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
    second.cancel()
    await asyncio.wait({stopping, second})
    if not stopping.cancelled():
        stopping.result()
    return 0
