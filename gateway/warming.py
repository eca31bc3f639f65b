"""Computing a prompt into the cache of a worker, without generating."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import grpc

from prefixgate.gateway.call_end import check_end, completion, record_usage
from prefixgate.gateway.errors import CallError, NoWorkerError
from prefixgate.gateway.fleet import Fleet, may_retry
from prefixgate.gateway.live_calls import Call
from prefixgate.gateway.member import Placement
from prefixgate.gateway.metrics import GatewayMetrics
from prefixgate.gateway.prompt_encoder import PromptEncoder
from prefixgate.gateway.validation import check_encoded_prompt, check_request
from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2
from prefixgate.proto.fields import invalid


class Warmer:
    """Runs warms, each on the worker that the fleet chooses for its prompt: where a call with it will go.

    One that a worker drops is sent to another, once, however far it was: its client has got nothing that could be
    repeated. How far it is begins anew there, and is told again where that is further than before.
    """

    def __init__(self, fleet: Fleet, encoder: PromptEncoder, metrics: GatewayMetrics) -> None:
        self._fleet = fleet
        self._encoder = encoder
        self._metrics = metrics

    async def run(
        self, request: gateway_pb2.WarmRequest, call: Call, time_remaining: Callable[[], float | None]
    ) -> AsyncGenerator[gateway_pb2.WarmResponse, None]:
        """Yield how far the prompt is, then ``completion``. Close the iterator to cancel at the worker.

        ``time_remaining`` tells the seconds to the client's deadline, None without one. Raises FieldError and
        CallError; what ends without ``completion`` has always raised.
        """
        model = self._fleet.model
        check_request(request, model.description, call.charge.limits)
        token_ids = await self._encoder.encode(request, model, call)
        check_encoded_prompt(request, len(token_ids), model.description, call.charge.limits)
        most = model.description.max_call_tokens
        if len(token_ids) > most:
            raise invalid(
                request.WhichOneof("input") or "input", f"comes to {len(token_ids)} tokens; must be at most {most}"
            )
        call.charge.reserve(len(token_ids), 0)
        scope = model.scope(call.tenant, request.cache.salt)
        names = await self._fleet.names_of_long(scope, token_ids, self._encoder.beside)
        told = 0
        failed: set[str] = set()
        while True:
            submit = _submission(request, call, time_remaining())
            submit.token_ids.extend(token_ids)
            with self._fleet.place(scope, token_ids, avoid=failed, hashes=names) as placement:
                if not placement.connection.model.is_alike(model):
                    # All workers went, and others came, while the prompt was encoded.
                    raise NoWorkerError("the workers serve another model now; try again")
                try:
                    async with aclosing(self._attempt(submit, call, placement)) as messages:
                        async for message in messages:
                            if message.progress.computed_tokens >= told or message.HasField("completion"):
                                told = message.progress.computed_tokens
                                yield message
                    return
                except CallError as error:
                    failed.add(placement.worker)
                    if not may_retry(error, failed, self._fleet):
                        raise

    async def _attempt(
        self, submit: worker_pb2.Submit, call: Call, placement: Placement
    ) -> AsyncGenerator[gateway_pb2.WarmResponse, None]:
        description = placement.connection.model.description
        call.record.worker, call.record.attempts = placement.worker, call.record.attempts + 1
        trace, outcome = call.trace.attempt(submit, placement.choice), grpc.StatusCode.CANCELLED.name
        # Last, so that nothing can fail between the call's start at the worker and the promise to end it there.
        worker_call = placement.connection.session.submit(submit)
        try:
            while True:
                event = await worker_call.receive()
                if event.HasField("prefill"):
                    yield gateway_pb2.WarmResponse(progress=_progress(event.prefill, len(submit.token_ids)))
                if event.HasField("end"):
                    break
            record_usage(self._metrics, call, placement.choice, event.end)
            check_end(event.end, placement)
            placement.answered()
            outcome = ""
            yield gateway_pb2.WarmResponse(completion=completion(event.end, call, description))
        except CallError as error:
            outcome = error.code.name
            raise
        finally:
            worker_call.close()
            trace.end(outcome)


def _submission(request: gateway_pb2.WarmRequest, call: Call, time_remaining: float | None) -> worker_pb2.Submit:
    submit = worker_pb2.Submit(
        tenant=call.tenant,
        request_id=call.request_id,
        sampling=generation_pb2.SamplingParams(max_tokens=1),
        n=1,
        cache=request.cache,
        prefill_only=True,
    )
    if time_remaining is not None:
        if time_remaining <= 0:
            raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the call began")
        submit.deadline_seconds = time_remaining
    if request.HasField("priority"):
        submit.priority = request.priority
    return submit


def _progress(prefill: worker_pb2.Prefill, prompt_tokens: int) -> gateway_pb2.WarmProgress:
    return gateway_pb2.WarmProgress(
        prompt_tokens=prompt_tokens, cached_tokens=prefill.cached_tokens, computed_tokens=prefill.computed_tokens
    )
