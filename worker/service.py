"""The Worker service: translates between the protocol and the engine, and refuses what comes at the wrong time."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from grpc import StatusCode
from grpc.aio import ServicerContext

from prefixgate.proto import gateway_pb2, worker_pb2, worker_pb2_grpc
from prefixgate.proto.field_table import HELLO, TABLE
from prefixgate.proto.fields import Bound, Bounds, FieldError
from prefixgate.proto.status_details import field_violation, pack, retry_after
from prefixgate.proto.transport import PROTOCOL_VERSION, STATUS_DETAILS_KEY
from prefixgate.worker.cache_control import CacheControl
from prefixgate.worker.control_wire import read_pin_id, write_explanation, write_pin, write_standing
from prefixgate.worker.engine import Engine
from prefixgate.worker.event_stream import EventStream, EventStreamClosedError
from prefixgate.worker.executor import FAULT
from prefixgate.worker.model_runner import ModelSpec
from prefixgate.worker.observations import Observations
from prefixgate.worker.pool_map import draw
from prefixgate.worker.request import End, RefusedError, Request
from prefixgate.worker.session import CODES, Session, SessionEndedError
from prefixgate.worker.survey import write_survey, write_totals
from prefixgate.worker.wire import scope_of, write_load

T = TypeVar("T")
Context = ServicerContext[Any, Any]

SHUTTING_DOWN = End(StatusCode.UNAVAILABLE, "the worker is shutting down; try again later")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready, and the engine that runs it."""

    spec: ModelSpec
    description: worker_pb2.ModelDescription
    engine: Engine
    observations: Observations
    max_outputs: int
    pin_limit: int
    """In blocks."""

    @property
    def bounds(self) -> Bounds:
        """What the fields of a prompt must keep to."""
        spec = self.spec
        return Bounds({Bound.VOCABULARY_SIZE: spec.vocabulary_size, Bound.PROMPT_TOKENS: spec.context_length - 1})


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Answers gateways. Refuses all of them until ``serve``, and new calls after ``drain``."""

    def __init__(self, call_ended: Callable[[Request, End], None] = lambda request, end: None) -> None:
        """``call_ended`` is told of each call that the engine has ended, and does not raise."""
        self._call_ended = call_ended
        self._model: ServedModel | None = None
        self._draining = False
        self._sessions: set[Session] = set()
        self._streams: set[EventStream] = set()
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
        for stream in self._streams:
            stream.close()
        while self._sessions or self._streams:
            self._progress.clear()
            await self._progress.wait()

    # Methods of the protocol

    async def Describe(
        self,
        request: worker_pb2.DescribeRequest,
        context: ServicerContext[worker_pb2.DescribeRequest, worker_pb2.ModelDescription],
    ) -> worker_pb2.ModelDescription:
        """Tell all that a gateway needs to serve the model."""
        model = await self._ready(context)
        if self._draining:
            # Who asks would serve, and would learn only from its session that there is nothing to serve with.
            await context.abort(SHUTTING_DOWN.code, SHUTTING_DOWN.message)
        return model.description

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
            call_ended=self._call_ended,
        )
        self._sessions.add(session)
        try:
            await session.run(requests, context.write)
        finally:
            self._sessions.discard(session)
            self._progress.set()

    async def Events(  # type: ignore[override]  # as Session
        self, request: worker_pb2.EventsRequest, context: Context
    ) -> None:
        """Tell a gateway what the cache holds and how much there is to do, as it changes."""
        model = await self._ready(context)
        try:
            _check_incarnation(request.incarnation, model.description)
            await self._follow(model, context)
        except (SessionEndedError, RefusedError) as error:
            end = End(error.code, str(error)) if isinstance(error, SessionEndedError) else error.end
            await context.abort(end.code, end.message)
        except asyncio.CancelledError:
            if context.cancelled():
                raise
            await context.abort(SHUTTING_DOWN.code, SHUTTING_DOWN.message)

    async def _follow(self, model: ServedModel, context: Context) -> None:
        engine = model.engine
        # Asked in nobody's name: the picture is the gateway's own, who knows all tenants' prompts anyway.
        stream = EventStream(
            engine.cache_feed,
            lambda: asyncio.wrap_future(engine.questions.ask("", lambda _: engine.cache_feed.snapshot())),
            lambda: write_load(engine.report(), draining=self._draining),
        )
        self._streams.add(stream)
        try:
            await stream.run(context.write)
        except EventStreamClosedError:
            raise SessionEndedError(SHUTTING_DOWN.code, SHUTTING_DOWN.message) from None
        finally:
            self._streams.discard(stream)
            self._progress.set()

    async def Report(self, request: worker_pb2.ReportRequest, context: Context) -> gateway_pb2.WorkerStats:
        """Tell how a tenant stands."""
        model, tenant = await self._ready(context), request.tenant
        stats = gateway_pb2.WorkerStats(incarnation=model.description.incarnation)
        stats.pool.block_size = model.description.block_size
        stats.pool.total_blocks = model.engine.report().total_blocks
        stats.pool.pin_limit_blocks = model.pin_limit
        if tenant:
            standing = await self._ask(request, context, tenant, lambda control: control.standing(tenant))
            # Of tenants that are not in the settings only a sum is kept, which is none of theirs to see.
            counts = model.observations if tenant in model.observations.tenants else None
            queried, hit = (counts.queried_tokens(tenant), counts.hit_tokens(tenant)) if counts else (0, 0)
            stats.tenant.CopyFrom(write_standing(standing, queried_tokens=queried, hit_tokens=hit))
        return stats

    async def Survey(self, request: worker_pb2.SurveyRequest, context: Context) -> worker_pb2.WorkerSurvey:
        """Tell how the pool and all calls stand."""
        model = await self._ready(context)
        engine, counts = model.engine, model.observations
        totals = write_totals(engine.report(), counts)
        totals.incarnation = model.description.incarnation
        if not request.max_cells:
            return totals
        # Asked in nobody's name, as a snapshot is.
        survey = await self._ask(request, context, "", lambda _: engine.surveyor.take())
        # Counted on a thread of its own: it takes longer than to copy, and streams go on meanwhile.
        drawn = await asyncio.to_thread(draw, survey.picture, request.max_cells)
        return write_survey(totals, survey, drawn, counts)

    # Cache control

    async def Explain(self, request: worker_pb2.CachedPrompt, context: Context) -> gateway_pb2.ExplainResponse:
        """Tell where a prompt leaves the cache, and why."""
        model, token_ids = await self._ready(context), request.token_ids
        scope = scope_of(model.spec, request.tenant, request.salt)
        found = await self._ask(request, context, request.tenant, lambda control: control.explain(scope, token_ids))
        return write_explanation(found, prompt_tokens=len(token_ids), incarnation=model.description.incarnation)

    async def Pin(self, request: worker_pb2.PinCommand, context: Context) -> gateway_pb2.PinResponse:
        """Keep what is cached of a prompt for a time."""
        model, prompt, seconds = await self._ready(context), request.prompt, request.ttl_seconds
        scope = scope_of(model.spec, prompt.tenant, prompt.salt)
        pin = await self._ask(
            request, context, prompt.tenant, lambda control: control.pin(scope, prompt.token_ids, seconds), changes=True
        )
        return gateway_pb2.PinResponse(
            pin=write_pin(pin, incarnation=model.description.incarnation), prompt_tokens=len(prompt.token_ids)
        )

    async def Unpin(self, request: worker_pb2.UnpinCommand, context: Context) -> gateway_pb2.UnpinResponse:
        """End a pin before its time."""
        pin_id = read_pin_id(request.pin_id)
        await self._ask(
            request, context, request.tenant, lambda control: control.unpin(request.tenant, pin_id), changes=True
        )
        return gateway_pb2.UnpinResponse()

    async def ListPins(self, request: worker_pb2.ListPinsCommand, context: Context) -> gateway_pb2.ListPinsResponse:
        """List a tenant's pins."""
        pins = await self._ask(request, context, request.tenant, lambda control: control.pins(request.tenant))
        incarnation = (await self._ready(context)).description.incarnation
        return gateway_pb2.ListPinsResponse(pins=[write_pin(pin, incarnation=incarnation) for pin in pins])

    async def Flush(self, request: worker_pb2.FlushCommand, context: Context) -> gateway_pb2.FlushResponse:
        """Forget what is cached for a tenant."""
        salt = request.salt if request.HasField("salt") else None
        done = await self._ask(
            request, context, request.tenant, lambda control: control.flush(request.tenant, salt), changes=True
        )
        return gateway_pb2.FlushResponse(freed_blocks=done.freed_blocks, ended_pins=done.ended_pins)

    async def _ask(
        self, request: Any, context: Context, tenant: str, work: Callable[[CacheControl], T], *, changes: bool = False
    ) -> T:
        """Check a request and have it answered between two steps. A caller who gives up takes the question back."""
        model = await self._ready(context)
        try:
            TABLE[request.DESCRIPTOR.name].check("", request, model.bounds)
            return await asyncio.wrap_future(model.engine.questions.ask(tenant, work, changes=changes))
        except Exception as error:
            end = _end_of(error)
            await context.abort(end.code, end.message, _details_of(end))
            raise

    async def _ready(self, context: Context) -> ServedModel:
        if self._model is None:
            await context.abort(StatusCode.UNAVAILABLE, "the model is loading; try again later")
        return self._model


def _end_of(error: Exception) -> End:
    """Tell how a call ends; an error that nobody planned was logged where it was raised."""
    if isinstance(error, FieldError):
        return End(CODES[error.code], error.message, field=error.field)
    return error.end if isinstance(error, RefusedError) else FAULT


def _details_of(end: End) -> tuple[tuple[str, bytes], ...]:
    infos = [field_violation(end.field, end.message)] if end.field else []
    infos += [retry_after(end.retry_seconds)] if end.retry_seconds else []
    return ((STATUS_DETAILS_KEY, pack(end.code.value[0], end.message, *infos)),) if infos else ()


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
    _check_incarnation(hello.incarnation, description)
    if not hmac.compare_digest(hello.hash_key_fingerprint, description.hash_key_fingerprint):
        _refuse("hash_key_fingerprint: gateway and worker have different hash keys")


def _check_incarnation(incarnation: str, description: worker_pb2.ModelDescription) -> None:
    if incarnation != description.incarnation:
        _refuse("incarnation: another life of this worker is meant; describe it again")


def _refuse(message: str) -> NoReturn:
    raise SessionEndedError(StatusCode.FAILED_PRECONDITION, message)
