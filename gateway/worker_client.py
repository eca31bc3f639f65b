"""The gateway's side of the hop to its worker: finds it, checks it, and keeps one stream to it open."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import grpc.aio

from prefixgate.gateway.errors import NoWorkerError
from prefixgate.gateway.served_model import ServedModel, WorkerRefusedError, check_description, load_model
from prefixgate.gateway.worker_session import WorkerSession
from prefixgate.proto import worker_pb2, worker_pb2_grpc
from prefixgate.proto.transport import CHANNEL_OPTIONS, PROTOCOL_VERSION

logger = logging.getLogger(__name__)

_DESCRIBE_SECONDS = 30.0
_REPORT_SECONDS = 5.0
# gRPC by itself waits up to two minutes before it tries a lost worker's address again.
_EAGER = tuple((f"grpc.{name}_reconnect_backoff_ms", 250) for name in ("initial", "min", "max"))


class Backoff(NamedTuple):
    """Seconds between attempts to reach a worker: doubled from ``first`` to ``longest``, each cut at random."""

    first: float = 0.1
    longest: float = 5.0

    def delay(self, attempt: int) -> float:
        """Return the pause after a number of failures in a row, the first of them being 0."""
        # The exponent is bounded, as a float's is.
        return min(self.longest, self.first * 2.0 ** min(attempt, 30)) * random.uniform(0.5, 1)


class Connection(NamedTuple):
    """A worker that serves now. A call stays with the one it began with."""

    model: ServedModel
    session: WorkerSession


class WorkerClient:
    """Keeps the connection to one worker, for as long as ``run`` runs."""

    def __init__(
        self,
        address: str,
        *,
        hash_key_fingerprint: bytes,
        gateway_name: str,
        on_change: Callable[[bool], Awaitable[None]],
        backoff: Backoff = Backoff(),  # noqa: B008  # immutable
    ) -> None:
        """``on_change`` is told whenever the worker begins or ceases to serve."""
        self._address = address
        self._fingerprint = hash_key_fingerprint
        self._gateway_name = gateway_name
        self._on_change = on_change
        self._backoff = backoff
        # In quotes, since only the type hints know of it.
        self._stub: worker_pb2_grpc.WorkerAsyncStub | None = None
        self._connection: Connection | None = None
        self._model: ServedModel | None = None
        """The last model, kept for its text assets: a worker that restarts most often serves the same."""
        self._complaint = ""

    @property
    def is_ready(self) -> bool:
        """Whether calls can be submitted now."""
        return self._connection is not None

    @property
    def connection(self) -> Connection:
        """The worker that serves now. Raises NoWorkerError."""
        if self._connection is None:
            raise NoWorkerError
        return self._connection

    async def report(self, tenant: str) -> worker_pb2.WorkerReport:
        """Ask the worker how it stands. Raises NoWorkerError."""
        if self._connection is None or self._stub is None:
            raise NoWorkerError
        try:
            return await self._stub.Report(worker_pb2.ReportRequest(tenant=tenant), timeout=_REPORT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise NoWorkerError("the worker does not answer; try again later") from error

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost, until cancelled."""
        async with grpc.aio.insecure_channel(self._address, options=[*CHANNEL_OPTIONS, *_EAGER]) as channel:
            self._stub = worker_pb2_grpc.WorkerStub(channel)
            loop, attempt = asyncio.get_running_loop(), 0
            while True:
                since = loop.time()
                self._complain(await self._try(self._stub))
                if loop.time() - since > self._backoff.longest:
                    attempt = 0
                await asyncio.sleep(self._backoff.delay(attempt))
                attempt += 1

    async def _try(self, stub: "worker_pb2_grpc.WorkerAsyncStub") -> str:
        """Serve through the worker until that ends; returns why it did, or why it could not begin."""
        try:
            return await self._serve(stub)
        except WorkerRefusedError as error:
            return f"it is refused: {error}"
        except grpc.aio.AioRpcError as error:
            return f"it does not answer: {error.code().name}: {error.details()}"
        except Exception:
            # Whatever a worker sends, this gateway keeps trying: the next worker at this address may be a sound one.
            logger.exception("The worker at %s made the gateway fail", self._address)
            return "it made the gateway fail"

    async def _serve(self, stub: "worker_pb2_grpc.WorkerAsyncStub") -> str:
        description = await stub.Describe(worker_pb2.DescribeRequest(), timeout=_DESCRIBE_SECONDS, wait_for_ready=True)
        check_description(description, self._fingerprint)
        self._model = await asyncio.to_thread(load_model, description, self._model)
        hello = worker_pb2.Hello(
            gateway=self._gateway_name,
            protocol_version=PROTOCOL_VERSION,
            incarnation=description.incarnation,
            hash_key_fingerprint=self._fingerprint,
        )
        logger.info("Worker %s serves %s, life %s", self._address, description.model, description.incarnation)
        self._complaint = ""
        try:
            await self._on_change(True)
            # Nothing may come between: a call that is submitted to a session that never runs would never end.
            self._connection = Connection(self._model, WorkerSession(stub.Session(), hello))
            return await self._connection.session.run()
        finally:
            self._connection = None
            await self._on_change(False)

    def _complain(self, complaint: str) -> None:
        # Once for each reason, not once for each attempt.
        if complaint != self._complaint:
            logger.warning("No worker at %s: %s", self._address, complaint)
            self._complaint = complaint
