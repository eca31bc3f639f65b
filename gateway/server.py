"""The gateway process: what it is made of, and how it starts, serves and stops."""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import grpc.aio
import uvloop
from grpc_health.v1 import health_pb2_grpc

from prefixgate.cache.hashing import BlockHasher
from prefixgate.config.address import Address, parse_address
from prefixgate.config.hash_key import require_hash_key
from prefixgate.config.limit_settings import NO_LIMITS, TENANT_LIMITS, LimitSettings
from prefixgate.config.settings import Settings, SettingsError, TenantSettings
from prefixgate.gateway.auth import Authenticator
from prefixgate.gateway.cache_control import CacheControl
from prefixgate.gateway.call_boundary import CallBoundary
from prefixgate.gateway.call_guard import CallGuard
from prefixgate.gateway.call_limits import limits_of
from prefixgate.gateway.call_trace import UNTRACED, Traces
from prefixgate.gateway.encoding_threads import EncodingThreads
from prefixgate.gateway.fleet import Fleet
from prefixgate.gateway.fleet_readings import fleet_readings
from prefixgate.gateway.generation import Generator
from prefixgate.gateway.listening import listen
from prefixgate.gateway.live_calls import BUSY_SECONDS, LiveCalls
from prefixgate.gateway.membership import Membership
from prefixgate.gateway.metrics import (
    LIVE_CALLS,
    LONGEST_WAIT,
    OLDEST_CALL,
    RENDERED,
    WAITING_CALLS,
    WORKER_READY,
    GatewayMetrics,
)
from prefixgate.gateway.operator_access import OperatorAccess
from prefixgate.gateway.prompt_encoder import PromptEncoder
from prefixgate.gateway.quota import Quotas
from prefixgate.gateway.router import PrefixRouter
from prefixgate.gateway.service import GatewayService
from prefixgate.gateway.settings_watch import SettingsWatch
from prefixgate.gateway.status_board import open_board
from prefixgate.gateway.status_page import status_pages
from prefixgate.gateway.tenants import LOCAL_TENANT
from prefixgate.gateway.traces import open_traces
from prefixgate.gateway.warming import Warmer
from prefixgate.gateway.worker_link import link_of
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc
from prefixgate.proto.access import ACCESS_PURPOSE
from prefixgate.proto.health import Health
from prefixgate.proto.http_server import Check, HttpServer
from prefixgate.proto.metrics_page import MetricsPage
from prefixgate.proto.pulse import Pulse
from prefixgate.proto.transport import client_facing

logger = logging.getLogger(__name__)

SERVICE_NAME: str = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name

_SWITCH_SECONDS = 0.0005
"""How long a thread that wants to run waits for the one that runs. The interpreter's own 5 ms are what a scrape would
wait each time that it meets the event loop at work."""
_END_SECONDS = 2.0
"""For each thing to end that has been told to. Whatever does not is left behind: the process ends anyway."""
_LAST_WORDS_SECONDS = 1.0
"""For statuses on their way when all calls have ended. Whoever does not read them is cut off then."""
_LAST_SPANS_SECONDS = 2.0
"""For spans that were not sent yet."""
_MAX_ENCODING_THREADS = 4


class GatewayServer:
    """One gateway, in the event loop that it is made in."""

    def __init__(
        self,
        settings: Settings,
        hasher: BlockHasher,
        *,
        traces: Traces = UNTRACED,
        quota_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind both ports. Raises SettingsError for what cannot be used, such as a port that is taken.

        ``quota_clock`` tells the seconds by which quotas fill.
        """
        gateway = settings.gateway
        self._authenticator = Authenticator(settings.tenants, local_allowed=parse_address(gateway.listen).is_local)
        self._quotas = Quotas(
            settings.limits,
            _own_limits(settings.tenants),
            default_max_tokens=gateway.default_max_tokens,
            clock=quota_clock,
        )
        self._live = LiveCalls()
        self._is_draining = False
        self._health = Health(SERVICE_NAME)
        router = PrefixRouter(hasher, settings.routing)
        self._fleet = Fleet(
            Membership(gateway.workers),
            router,
            hash_key_fingerprint=hasher.fingerprint,
            gateway_name=_name(),
            on_change=self._set_health,
            link=link_of(gateway, hasher.derive(ACCESS_PURPOSE)),
        )
        self._metrics = metrics = GatewayMetrics(
            settings.tenants or (LOCAL_TENANT,),
            {
                LIVE_CALLS: lambda: self._live.num_live,
                OLDEST_CALL: lambda: self._live.oldest_seconds,
                WAITING_CALLS: lambda: self._live.num_waiting,
                LONGEST_WAIT: lambda: self._live.longest_wait_seconds,
                RENDERED: time.time,
                WORKER_READY: lambda: self._fleet.is_ready,
                **fleet_readings(self._fleet),
            },
        )
        self._threads = EncodingThreads(min(_MAX_ENCODING_THREADS, os.cpu_count() or 1))
        self._encoder = encoder = PromptEncoder(self._threads, metrics, max_prompt_bytes=_max_prompt_bytes(settings))
        guard = CallGuard(self._authenticator.authenticate, metrics)
        service = GatewayService(
            CallBoundary(self._live, metrics, guard.tenant, self._quotas, traces),
            Generator(self._fleet, encoder, metrics),
            encoder,
            self._fleet,
            CacheControl(self._fleet, encoder),
            Warmer(self._fleet, encoder, metrics),
        )
        self._server = grpc.aio.server(interceptors=[guard], options=client_facing(gateway.max_message_bytes))
        gateway_pb2_grpc.add_GatewayServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.address = listen(self._server, settings)
        page = MetricsPage(gateway.metrics_seconds)
        page.show(metrics.families)
        http = parse_address(gateway.http)
        self._access = OperatorAccess(gateway.operator_keys, is_local=http.is_local)
        self._board = open_board(self._fleet, router.index, self._live, is_draining=lambda: self._is_draining)
        pages = status_pages(self._access, self._board.read, asyncio.get_running_loop())
        checks = {"/healthz": self._liveness, "/readyz": self._readiness, "/busyz": self._room}
        try:
            self._http = HttpServer(http.host, http.port, page, checks, pages)
        except OSError as error:
            raise SettingsError(f"gateway.http: cannot listen on {gateway.http}: {error.strerror}") from error
        self.http_address = Address(host=http.host, port=self._http.port)
        """Where metrics are served."""
        self._pulse = Pulse()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_ready(self) -> bool:
        """Whether calls are served now. May be read from other threads."""
        return self._fleet.is_ready and not self._is_draining

    async def start(self) -> None:
        """Serve from now on; health says SERVING once a worker is found."""
        await self._set_health(False)
        besides = (self._fleet.run(), self._pulse.run(), self._board.run())
        self._tasks = [asyncio.create_task(beside) for beside in besides]
        await self._server.start()
        self._http.start()
        logger.info("Serving on %s, metrics on http://%s/metrics", self.address, self.http_address)
        if self._access.is_possible:
            logger.info("Status page on http://%s/status", self.http_address)
        else:
            logger.info("No status page: gateway.http is not a loopback address, and gateway.operator_keys are not set")

    def apply(self, settings: Settings) -> None:
        """Take over tenants and limits from other settings, for the calls that come. Raises SettingsError."""
        self._authenticator.replace(settings.tenants)
        self._access.replace(settings.gateway.operator_keys)
        self._quotas.change(settings.limits, _own_limits(settings.tenants))
        self._metrics.know(settings.tenants)
        self._encoder.max_prompt_bytes = _max_prompt_bytes(settings)

    async def until_failed(self) -> BaseException | None:
        """Wait until what runs beside the calls has ended, which it never should. Returns why it did, where it said."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = done.pop()
        return None if ended.cancelled() else ended.exception()

    async def stop(self, drain_seconds: float) -> None:
        """Take no new calls, let live ones finish within ``drain_seconds``, and end everything. Only after ``start``.

        When cancelled while it waits, what is left is cut off at once, as it is when the time is over: each call with
        a status.
        """
        self._is_draining = True
        try:
            self._health.drain()
            await self._live.drain(drain_seconds)
        finally:
            self._health.close()
            self._live.cut_off()
            # The library waits for every call that anything still refers to, however long that is.
            await _end("the server", self._server.stop(_LAST_WORDS_SECONDS), _LAST_WORDS_SECONDS + _END_SECONDS)
            for task in self._tasks:
                task.cancel()
            await _end("what follows the workers", asyncio.gather(*self._tasks, return_exceptions=True), _END_SECONDS)
            await _end("the metrics page", asyncio.to_thread(self._http.stop), _END_SECONDS)
            self._threads.stop()

    async def _set_health(self, is_serving: bool) -> None:
        self._health.tell(serving=is_serving)

    # The three answers, each to a question of its own; asked on other threads.

    def _liveness(self) -> Check:
        """Whether to leave the process as it is, also while it has no worker, drains, or has much to do."""
        return Check(False, "stuck: the event loop does not turn") if self._pulse.is_stuck else Check(True, "alive")

    def _readiness(self) -> Check:
        """Whether to send calls here."""
        return Check(True, "ready") if self.is_ready else Check(False, "not ready: no worker, or shutting down")

    def _room(self) -> Check:
        """Whether a call can expect its first token soon."""
        waiting, longest = self._live.num_waiting, self._live.longest_wait_seconds
        busy = longest > BUSY_SECONDS
        return Check(
            not busy,
            f"{'busy' if busy else 'not busy'}: {self._live.num_live} calls, of which {waiting} wait for their first "
            f"token, the oldest for {longest:.1f} s",
        )


def _name() -> str:
    """Name this process, for the logs of workers and for traces."""
    return f"{socket.gethostname()}:{os.getpid()}"[:128]


async def _end(what: str, ending: Awaitable[object], seconds: float) -> None:
    """Wait until something has ended, or long enough. It is not cancelled: that could take as long again."""
    future = asyncio.ensure_future(ending)
    await asyncio.wait([future], timeout=seconds)
    if not future.done():
        logger.error("%s did not end within %g seconds and is left behind", what, seconds)
    elif not future.cancelled():
        future.result()


def _max_prompt_bytes(settings: Settings) -> int:
    """Return how long a prompt of any tenant can be."""
    return limits_of(settings.gateway.default_max_tokens, settings.limits, NO_LIMITS).max_prompt_bytes


def _own_limits(tenants: Mapping[str, TenantSettings]) -> dict[str, LimitSettings]:
    """List who can call, each with limits of its own."""
    return {name: tenant.limits for name, tenant in tenants.items()} or {LOCAL_TENANT: TENANT_LIMITS}


def run(
    settings: Settings, file: Path | None, load: Callable[[], Settings], *, leave: Callable[[int], None] | None = None
) -> int:
    """Run a gateway until SIGTERM or SIGINT, and return the process's exit code.

    Live calls then finish within ``gateway.drain_seconds``; a second signal ends them. ``load`` reads the settings
    again when their ``file`` changes or SIGHUP comes. ``leave`` is told the exit code when all has ended in order, and
    may end the process at once: to close the event loop is to wait for every thread that looks up a name or encodes.
    Raises SettingsError.
    """
    hasher = BlockHasher(require_hash_key(settings.cache))
    sys.setswitchinterval(_SWITCH_SECONDS)
    # A call takes some 25 turns of the loop, and a token two: asyncio's own loop is a quarter of all that they cost.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_run(settings, hasher, file, load))
        if leave is not None:
            leave(code)
        return code


async def _run(settings: Settings, hasher: BlockHasher, file: Path | None, load: Callable[[], Settings]) -> int:
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    traces = open_traces(settings.tracing, _name())
    server = GatewayServer(settings, hasher, traces=traces)
    await server.start()
    watching = None
    if file is not None:
        watch = SettingsWatch(file, settings, load)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, watch.ask)
        watching = asyncio.create_task(watch.run(server.apply))
    asked, failed = asyncio.create_task(signals.get()), asyncio.create_task(server.until_failed())
    await asyncio.wait({asked, failed}, return_when=asyncio.FIRST_COMPLETED)
    code = 0 if asked.done() else 1
    if asked.done():
        logger.info("%s: shutting down", signal.Signals(asked.result()).name)
    else:
        # It would live on without ever finding a worker again.
        logger.critical("The gateway failed; shutting down", exc_info=failed.result())
        asked.cancel()
    failed.cancel()
    if watching is not None:
        watching.cancel()
    stopping = asyncio.create_task(server.stop(settings.gateway.drain_seconds))
    second = asyncio.create_task(signals.get())
    await asyncio.wait({stopping, second}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
    second.cancel()
    await asyncio.wait({stopping, second})
    await asyncio.to_thread(traces.close, _LAST_SPANS_SECONDS)
    if not stopping.cancelled():
        stopping.result()
    return code
