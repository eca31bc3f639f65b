"""The gateway's side of the hop to one worker: finds it, checks it, and keeps one stream to it open."""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

import grpc.aio

from prefixgate.gateway.backoff import Backoff
from prefixgate.gateway.common_model import CommonModel
from prefixgate.gateway.errors import NoWorkerError, is_being_cancelled
from prefixgate.gateway.served_model import ServedModel, WorkerRefusedError
from prefixgate.gateway.worker_events import WorkerEvents
from prefixgate.gateway.worker_link import WorkerLink
from prefixgate.gateway.worker_session import WorkerSession
from prefixgate.proto import worker_pb2, worker_pb2_grpc
from prefixgate.proto.tls import TlsError
from prefixgate.proto.transport import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

ABSENT = Backoff(first=0.1, longest=0.5)
"""Between attempts to reach a worker. Short, as one that loads says no at once, and its calls wait for none but us."""
REFUSED = Backoff(first=0.5, longest=10.0)
"""Between attempts with one that answered, and with which this gateway cannot work: it sends all of its tokenizer."""
_DESCRIBE_SECONDS = 30.0
_LAST_ANSWERS_SECONDS = 1.0


class Connection(NamedTuple):
    """A worker that serves now. A call stays with the one it began with."""

    model: ServedModel
    session: WorkerSession
    stub: "worker_pb2_grpc.WorkerAsyncStub"  # in quotes, since only the type hints know of it


class Probe(NamedTuple):
    """How a worker is found that keeps its connection and does nothing any more."""

    interval: float = 2.0
    """Seconds between an answer and the next question."""
    timeout: float = 5.0
    """Seconds that an answer may take. Long, as a worker answers from a thread that shares its interpreter."""
    misses: int = 2
    """Answers in a row that did not come, after which it is held to hang."""


class _Lost(NamedTuple):
    """How an attempt ended."""

    why: str
    has_answered: bool = False
    """Whether there is a worker, with which this gateway cannot work."""


class WorkerClient:
    """Keeps the connection to one worker, for as long as ``run`` runs."""

    def __init__(
        self,
        address: str,
        common: CommonModel,
        events: WorkerEvents,
        *,
        hash_key_fingerprint: bytes,
        gateway_name: str,
        on_change: Callable[[], None],
        link: WorkerLink = WorkerLink(),  # noqa: B008  # immutable
        probe: Probe = Probe(),  # noqa: B008  # immutable
    ) -> None:
        """``common`` says whether the worker may serve, and ``events`` is told what it says of itself.

        ``on_change`` is called whenever a property has changed.
        """
        self.address = address
        self._common = common
        self._events = events
        self._fingerprint = hash_key_fingerprint
        self._gateway_name = gateway_name
        self._on_change = on_change
        self._link = link
        self._probe = probe
        self._connection: Connection | None = None
        self._misses = 0
        self._complaint = ""

    @property
    def is_ready(self) -> bool:
        """Whether calls can be submitted now."""
        return self._connection is not None and self._connection.session.is_open

    @property
    def is_responsive(self) -> bool:
        """Whether it has answered lately. One that is not may still come back, and its calls with it."""
        return self._misses < self._probe.misses

    @property
    def connection(self) -> Connection:
        """The worker that serves now. Raises NoWorkerError."""
        if self._connection is None or not self._connection.session.is_open:
            raise NoWorkerError
        return self._connection

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost, until cancelled."""
        loop, attempt = asyncio.get_running_loop(), 0
        while True:
            since = loop.time()
            lost = await self._try()
            self._complain(lost.why)
            if is_being_cancelled():
                # What it waited for took the cancel for an end of its own, and told of that instead.
                raise asyncio.CancelledError
            backoff = REFUSED if lost.has_answered else ABSENT
            if loop.time() - since > backoff.longest:
                attempt = 0
            await asyncio.sleep(backoff.delay(attempt))
            attempt += 1

    async def _try(self) -> "_Lost":
        """Serve through the worker until that ends; returns why it did, or why it could not begin."""
        try:
            # A channel for each attempt, so that TLS files that have changed are used by the next one.
            channel = self._link.open(self.address)
            try:
                return _Lost(await self._serve(self._link.stub(channel)))
            finally:
                # Others may be asking it something; where it is gone they have heard so.
                await channel.close(_LAST_ANSWERS_SECONDS)
        except TlsError as error:
            return _Lost(f"it cannot be reached by TLS: {error}")
        except WorkerRefusedError as error:
            return _Lost(f"it is refused: {error}", has_answered=True)
        except grpc.aio.AioRpcError as error:
            answered = error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            why = f"it does not answer: {error.code().name}: {error.details()}"
            return _Lost(why, answered)
        except Exception:
            # Whatever a worker sends, this gateway keeps trying: the next worker at this address may be a sound one.
            logger.exception("The worker at %s made the gateway fail", self.address)
            return _Lost("it made the gateway fail", has_answered=True)

    async def _serve(self, stub: "worker_pb2_grpc.WorkerAsyncStub") -> str:
        description = await stub.Describe(worker_pb2.DescribeRequest(), timeout=_DESCRIBE_SECONDS, wait_for_ready=True)
        async with self._common.joined(description) as model:
            hello = worker_pb2.Hello(
                gateway=self._gateway_name,
                protocol_version=PROTOCOL_VERSION,
                incarnation=description.incarnation,
                hash_key_fingerprint=self._fingerprint,
            )
            logger.info("Worker %s serves %s, life %s", self.address, description.model, description.incarnation)
            self._complaint = ""
            # Nothing may come between: a call that is submitted to a session that never runs would never end.
            session = WorkerSession(stub.Session(), hello)
            self._connection = Connection(model, session, stub)
            beside = [
                asyncio.create_task(self._keep_probing(stub)),
                asyncio.create_task(self._events.run(stub, description.incarnation)),
            ]
            try:
                self._on_change()
                return await session.run()
            finally:
                self._connection, self._misses = None, 0
                for task in beside:
                    task.cancel()
                self._events.forget()
                self._on_change()

    async def _keep_probing(self, stub: "worker_pb2_grpc.WorkerAsyncStub") -> None:
        """Ask again and again whether the worker still does something.

        Its stream alone would not tell: gRPC answers a ping from a thread of its own, whatever the program does.
        """
        while True:
            await asyncio.sleep(self._probe.interval)
            was_responsive = self.is_responsive
            try:
                await stub.Report(worker_pb2.ReportRequest(), timeout=self._probe.timeout)
                self._misses = 0
            except grpc.aio.AioRpcError as error:
                self._misses += 1
                if self._misses == self._probe.misses:
                    logger.warning("The worker at %s does not answer: %s", self.address, error.code().name)
            if self.is_responsive != was_responsive:
                self._on_change()

    def _complain(self, complaint: str) -> None:
        # Once for each reason, not once for each attempt.
        if complaint != self._complaint:
            logger.warning("No worker at %s: %s", self.address, complaint)
            self._complaint = complaint
