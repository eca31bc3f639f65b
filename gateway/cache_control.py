"""What tenants ask of the cache of all workers: where a prompt leaves it, what stays, and what goes.

The tenant is always that of the authenticated call. Each worker has a cache of its own, so what is asked of the fleet
is asked of every worker, or of the one that holds most of the prompt.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio

from prefixgate.gateway.errors import CallError, NoWorkerError, is_being_cancelled
from prefixgate.gateway.live_calls import Call
from prefixgate.gateway.prompt_encoder import PromptEncoder
from prefixgate.gateway.served_model import ServedModel
from prefixgate.gateway.validation import check_encoded_prompt, check_request
from prefixgate.gateway.worker_client import Connection
from prefixgate.proto import gateway_pb2, worker_pb2, worker_pb2_grpc
from prefixgate.proto.status_details import unpack
from prefixgate.proto.transport import STATUS_DETAILS_KEY

T = TypeVar("T")
Stub: TypeAlias = "worker_pb2_grpc.WorkerAsyncStub"  # in quotes, since only the type hints know of it
Prompted = gateway_pb2.ExplainRequest | gateway_pb2.PinRequest

_WORKER_SECONDS = 30.0
"""Time that a worker gets to answer. Questions wait for the step that runs, which takes seconds on a slow device."""
_REFUSALS = frozenset(
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
)
"""With what a worker refuses what a client wants. With all else it says that it cannot answer."""


class Workers(Protocol):
    """What is asked of the fleet."""

    @property
    def model(self) -> ServedModel:
        """What all workers serve. Raises NoWorkerError."""

    @property
    def num_unreachable(self) -> int:
        """Workers that are known and are not among ``connections``."""

    def connections(self) -> Sequence[Connection]:
        """The workers that can be asked now."""


class CacheControl:
    """Answers for the tenant of a call. Each method raises FieldError and CallError."""

    def __init__(self, workers: Workers, encoder: PromptEncoder) -> None:
        self._workers = workers
        self._encoder = encoder

    async def explain(self, request: gateway_pb2.ExplainRequest, call: Call) -> gateway_pb2.ExplainResponse:
        """Explain a prompt at the worker that holds most of it."""
        _, explanation = await self._best(await self._prompt(request, call))
        return explanation

    async def pin(self, request: gateway_pb2.PinRequest, call: Call) -> gateway_pb2.PinResponse:
        """Pin a prompt at the worker that holds most of it."""
        prompt = await self._prompt(request, call)
        connections = self._connections()
        worker = connections[0] if len(connections) == 1 else (await self._best(prompt))[0]
        command = worker_pb2.PinCommand(prompt=prompt, ttl_seconds=request.ttl_seconds)
        return await _answer(lambda: worker.stub.Pin(command, timeout=_WORKER_SECONDS))

    async def unpin(self, request: gateway_pb2.UnpinRequest, call: Call) -> gateway_pb2.UnpinResponse:
        """End a pin, whichever worker holds it: its name does not tell."""
        self._check(request, call)
        command = worker_pb2.UnpinCommand(tenant=call.tenant, pin_id=request.pin_id)
        unreachable = self._workers.num_unreachable
        answers = await self._ask_all(lambda stub: stub.Unpin(command, timeout=_WORKER_SECONDS))
        errors = [answer for answer in answers if isinstance(answer, CallError)]
        if len(errors) < len(answers):
            return gateway_pb2.UnpinResponse()
        # One that cannot answer may hold it.
        missing = sum(error.code is not grpc.StatusCode.NOT_FOUND for error in errors) + unreachable
        if missing:
            raise NoWorkerError(f"{missing} workers could not be reached, and may hold the pin; try again later")
        raise errors[0]

    async def list_pins(self, request: gateway_pb2.ListPinsRequest, call: Call) -> gateway_pb2.ListPinsResponse:
        """List the pins of all workers."""
        self._check(request, call)
        command = worker_pb2.ListPinsCommand(tenant=call.tenant)
        answers = await self._ask_all(lambda stub: stub.ListPins(command, timeout=_WORKER_SECONDS))
        pins: list[gateway_pb2.PinnedPrefix] = [pin for answer in _all_good(answers) for pin in answer.pins]
        pins.sort(key=lambda pin: pin.expires_in_seconds)
        return gateway_pb2.ListPinsResponse(pins=pins)

    async def flush(self, request: gateway_pb2.FlushRequest, call: Call) -> gateway_pb2.FlushResponse:
        """Flush all workers. Fails where not all are known to have done it: the client is to try again."""
        self._check(request, call)
        salt = request.salt if request.HasField("salt") else None
        command = worker_pb2.FlushCommand(tenant=call.tenant, salt=salt)
        # Counted now: one that comes back before the others have answered was not asked.
        unreachable = self._workers.num_unreachable
        answers = await self._ask_all(lambda stub: stub.Flush(command, timeout=_WORKER_SECONDS))
        done = [answer for answer in answers if isinstance(answer, gateway_pb2.FlushResponse)]
        missing = len(answers) - len(done) + unreachable
        if missing:
            raise NoWorkerError(
                f"flushed at {len(done)} workers; {missing} could not be reached, and may hold something still; try "
                "again later"
            )
        return gateway_pb2.FlushResponse(
            freed_blocks=sum(one.freed_blocks for one in done), ended_pins=sum(one.ended_pins for one in done)
        )

    async def stats(self, request: gateway_pb2.StatsRequest, call: Call) -> gateway_pb2.StatsResponse:
        """Add up what the workers say; those that do not answer are left out."""
        self._check(request, call)
        question = worker_pb2.ReportRequest(tenant=call.tenant)
        answers = await self._ask_all(lambda stub: stub.Report(question, timeout=_WORKER_SECONDS))
        reports = _good(answers)
        model = self._workers.model.description
        stats = gateway_pb2.StatsResponse(
            model=model.model,
            model_fingerprint=model.fingerprint,
            context_length=model.context_length,
            workers=reports,
        )
        for field in gateway_pb2.TenantStats.DESCRIPTOR.fields:
            setattr(stats.tenant, field.name, sum(getattr(report.tenant, field.name) for report in reports))
        return stats

    # Prompts

    async def _prompt(self, request: Prompted, call: Call) -> worker_pb2.CachedPrompt:
        model = self._check(request, call)
        token_ids = await self._encoder.encode(request, model, call)
        check_encoded_prompt(request, len(token_ids), model.description, call.charge.limits)
        return worker_pb2.CachedPrompt(tenant=call.tenant, salt=request.salt, token_ids=token_ids)

    def _check(self, request: Any, call: Call) -> ServedModel:
        model = self._workers.model
        check_request(request, model.description, call.charge.limits)
        return model

    async def _best(self, prompt: worker_pb2.CachedPrompt) -> tuple[Connection, gateway_pb2.ExplainResponse]:
        """Find the worker that holds most of a prompt, and what it says."""
        connections = self._connections()
        answers = await _outcomes(connections, lambda stub: stub.Explain(prompt, timeout=_WORKER_SECONDS))
        _good(answers)
        found = [
            (one, answer) for one, answer in zip(connections, answers, strict=True) if not isinstance(answer, CallError)
        ]
        return max(found, key=lambda pair: pair[1].cached_tokens)

    # Workers

    def _connections(self) -> Sequence[Connection]:
        connections = self._workers.connections()
        if not connections:
            raise NoWorkerError
        return connections

    async def _ask_all(self, ask: Callable[[Stub], Awaitable[T]]) -> list[T | CallError]:
        return await _outcomes(self._connections(), ask)


async def _outcomes(connections: Iterable[Connection], ask: Callable[[Stub], Awaitable[T]]) -> list[T | CallError]:
    """Wait for all answers, or why there are none."""

    async def outcome(connection: Connection) -> T | CallError:
        try:
            return await _answer(lambda: ask(connection.stub))
        except CallError as error:
            return error

    return await asyncio.gather(*map(outcome, connections))


async def _answer(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask a worker and wait for its answer. Raises CallError."""
    try:
        return await ask()
    except grpc.aio.AioRpcError as error:
        if error.code() in _REFUSALS:
            details = unpack(dict(error.trailing_metadata() or ()).get(STATUS_DETAILS_KEY, b""))
            field = details.violations[0].field if details.violations else ""
            message = error.details() or "the worker refuses"
            raise CallError(error.code(), message, details.retry_seconds or 0.0, field=field) from error
        raise _no_answer() from error
    except grpc.aio.UsageError as error:
        # The worker was lost while others were asked, and its connection is closed.
        raise _no_answer() from error
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        # So gRPC says that the connection was closed under the question.
        raise _no_answer() from error


def _no_answer() -> NoWorkerError:
    return NoWorkerError("a worker does not answer; try again later")


def _good(answers: Iterable[T | CallError]) -> list[T]:
    """Leave out the workers that gave none. Raises CallError where none did."""
    answers = list(answers)
    good = [answer for answer in answers if not isinstance(answer, CallError)]
    return good or _all_good(answers)


def _all_good(answers: Iterable[T | CallError]) -> list[T]:
    """Raise CallError where one worker gave none."""
    good = []
    for answer in answers:
        if isinstance(answer, CallError):
            raise answer
        good.append(answer)
    return good
