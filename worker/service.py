"""The Worker service: translates between the protocol and the engine, and refuses what comes at the wrong time."""

import asyncio
import hmac
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NoReturn

from grpc import StatusCode
from grpc.aio import ServicerContext

from prefixgate.proto import worker_pb2, worker_pb2_grpc
from prefixgate.proto.field_table import HELLO
from prefixgate.proto.fields import Bounds, FieldError
from prefixgate.proto.transport import PROTOCOL_VERSION
from prefixgate.worker.engine import Engine
from prefixgate.worker.model_runner import ModelSpec
from prefixgate.worker.observations import Observations
from prefixgate.worker.request import End
from prefixgate.worker.session import CODES, Session, SessionEndedError
from prefixgate.worker.wire import write_report

SHUTTING_DOWN = End(StatusCode.UNAVAILABLE, "the worker is shutting down; try again later")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready, and the engine that runs it."""

    spec: ModelSpec
    description: worker_pb2.ModelDescription
    engine: Engine
    observations: Observations
    max_outputs: int


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Answers gateways. Refuses all of them until ``serve``, and new calls after ``drain``."""

    def __init__(self) -> None:
        self._model: ServedModel | None = None
        self._draining = False
        self._sessions: set[Session] = set()
        self._progress = asyncio.Event()

    def serve(self, model: ServedModel) -> None:
        """Begin to answer for a model."""
        self._model = model

    def drain(self) -> None:
        """Refuse new streams and calls; those that live go on."""
        self._draining = True

    async def until_idle(self) -> None:
        """Wait until every call has ended and every gateway was told all."""
        while not all(session.is_idle for session in self._sessions):
            self._progress.clear()
            await self._progress.wait()

    async def close(self) -> None:
        """End all streams, after what is still to be said."""
        for session in self._sessions:
            session.close()
        while self._sessions:
            self._progress.clear()
            await self._progress.wait()

    # Methods of the protocol

    async def Describe(
        self,
        request: worker_pb2.DescribeRequest,
        context: ServicerContext[worker_pb2.DescribeRequest, worker_pb2.ModelDescription],
    ) -> worker_pb2.ModelDescription:
        """Tell all that a gateway needs to serve the model."""
        return (await self._ready(context)).description

    async def Report(
        self,
        request: worker_pb2.ReportRequest,
        context: ServicerContext[worker_pb2.ReportRequest, worker_pb2.WorkerReport],
    ) -> worker_pb2.WorkerReport:
        """Tell how the pool and the queue stand."""
        model = await self._ready(context)
        # Of tenants that are not in the settings only a sum is kept, which is none of theirs to see.
        known = request.tenant in model.observations.tenants
        return write_report(
            model.engine.report(),
            block_size=model.description.block_size,
            incarnation=model.description.incarnation,
            queried_tokens=model.observations.queried_tokens(request.tenant) if known else 0,
            hit_tokens=model.observations.hit_tokens(request.tenant) if known else 0,
        )

    async def Session(  # type: ignore[override]  # written to with `context.write`, so that a cancel arrives in here
        self,
        request_iterator: AsyncIterator[worker_pb2.SessionRequest],
        context: ServicerContext[worker_pb2.SessionRequest, worker_pb2.StepMessage],
    ) -> None:
        """Carry one gateway's calls."""
        try:
            # Read before anything is refused: where a stream has ended before the gateway's hello was written, that
            # write fails, and gRPC tells the gateway INTERNAL in place of the status sent from here.
            first = await anext(request_iterator, None)
            model = await self._ready(context)
            if self._draining:
                await context.abort(SHUTTING_DOWN.code, SHUTTING_DOWN.message)
            _check_hello(first, model.description)
            await self._carry(model, request_iterator, context)
        except SessionEndedError as error:
            await context.abort(error.code, str(error))
        except asyncio.CancelledError:
            # Let through, it would leave a gateway that did not cancel without a status, waiting for ever.
            if context.cancelled():
                raise
            await context.abort(SHUTTING_DOWN.code, SHUTTING_DOWN.message)

    async def _carry(
        self,
        model: ServedModel,
        requests: AsyncIterator[worker_pb2.SessionRequest],
        context: ServicerContext[worker_pb2.SessionRequest, worker_pb2.StepMessage],
    ) -> None:
        session = Session(
            model.engine,
            model.spec,
            max_outputs=model.max_outputs,
            refusal=lambda: SHUTTING_DOWN if self._draining else None,
            progress=self._progress,
        )
        self._sessions.add(session)
        try:
            await session.run(requests, context.write)
        finally:
            self._sessions.discard(session)
            self._progress.set()

    async def _ready(self, context: ServicerContext[Any, Any]) -> ServedModel:
        if self._model is None:
            await context.abort(StatusCode.UNAVAILABLE, "the model is loading; try again later")
        return self._model


def _check_hello(first: worker_pb2.SessionRequest | None, description: worker_pb2.ModelDescription) -> None:
    """Refuse a gateway that believes something else of this worker than what is."""
    if first is None or not first.HasField("hello"):
        _refuse("hello: must be the first message")
    hello = first.hello
    try:
        HELLO.check("", hello, Bounds({}))
    except FieldError as error:
        raise SessionEndedError(CODES[error.code], error.message) from error
    if hello.protocol_version != PROTOCOL_VERSION:
        _refuse(f"protocol_version: {hello.protocol_version}; this worker speaks {PROTOCOL_VERSION}")
    if hello.incarnation != description.incarnation:
        _refuse("incarnation: another life of this worker is meant; describe it again")
    if not hmac.compare_digest(hello.hash_key_fingerprint, description.hash_key_fingerprint):
        _refuse("hash_key_fingerprint: gateway and worker have different hash keys")


def _refuse(message: str) -> NoReturn:
    raise SessionEndedError(StatusCode.FAILED_PRECONDITION, message)
