"""One generation: from a checked request, over the worker, to deltas of text and one end."""

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AbstractContextManager

import grpc

from prefixgate.cache.hashing import BlockHash
from prefixgate.gateway.attempt import Attempt
from prefixgate.gateway.errors import CallError, NoWorkerError
from prefixgate.gateway.fleet import Fleet, may_retry
from prefixgate.gateway.live_calls import Call
from prefixgate.gateway.member import Placement
from prefixgate.gateway.metrics import GatewayMetrics
from prefixgate.gateway.prompt_encoder import PromptEncoder
from prefixgate.gateway.served_model import ServedModel
from prefixgate.gateway.validation import check_request, complete_sampling, num_outputs
from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2

logger = logging.getLogger(__name__)

_KEEPING = (generation_pb2.CACHE_MODE_UNSPECIFIED, generation_pb2.CACHE_MODE_DEFAULT)


class Generator:
    """Runs generations, each on the worker that the fleet chooses for it.

    A call that a worker drops before its client has got anything is sent to another one, once: nobody can tell. After
    that it never is. What the client has could be repeated, and a call that two workers have dropped may be what
    fells them.
    """

    def __init__(
        self,
        fleet: Fleet,
        encoder: PromptEncoder,
        metrics: GatewayMetrics,
    ) -> None:
        self._fleet = fleet
        self._encoder = encoder
        self._metrics = metrics

    async def run(
        self, request: gateway_pb2.GenerateRequest, call: Call, time_remaining: Callable[[], float | None]
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        """Yield the messages of a call, the last with ``completion``. Close the iterator to cancel at the worker.

        ``time_remaining`` tells the seconds to the client's deadline, None without one. Raises FieldError and
        CallError; what ends without ``completion`` has always raised.
        """
        model = self._fleet.model
        check_request(request, model.description, call.charge.limits)
        token_ids = await self._encoder.encode(request, model, call)
        scope = model.scope(call.tenant, request.cache.salt)
        names = await self._fleet.names_of_long(scope, token_ids, self._encoder.beside)
        failed: set[str] = set()
        while True:
            submit = self._submission(request, call, model.description, token_ids, time_remaining())
            if not failed:
                _describe(call, request, submit, model.description)
                call.charge.reserve(len(token_ids), submit.n * submit.sampling.max_tokens)
            with self._place(call.tenant, submit, model, token_ids, names, failed) as placement:
                if not placement.connection.model.is_alike(model):
                    # All workers went, and others came, while the prompt was encoded.
                    raise NoWorkerError("the workers serve another model now; try again")
                attempt = Attempt(request, submit, call, placement, self._metrics)
                try:
                    while not attempt.has_ended:
                        response = await attempt.receive()
                        attempt.is_told = True
                        yield response
                    return
                except CallError as error:
                    failed.add(placement.worker)
                    if attempt.is_told or not may_retry(error, failed, self._fleet):
                        raise
                    logger.info("%s request=%s goes to another worker: %s", call.method, call.request_id, error)
                finally:
                    attempt.close()

    def _place(
        self,
        tenant: str,
        submit: worker_pb2.Submit,
        model: ServedModel,
        token_ids: Sequence[int],
        names: Sequence[BlockHash] | None,
        failed: Collection[str],
    ) -> AbstractContextManager[Placement]:
        # Log-probabilities of the prompt are computed anew, beside the cache.
        cached = not submit.sampling.HasField("prompt_logprobs")
        return self._fleet.place(
            model.scope(tenant, submit.cache.salt),
            token_ids,
            reads_cache=cached and submit.cache.mode != generation_pb2.CACHE_MODE_BYPASS,
            keeps_blocks=cached and submit.cache.mode in _KEEPING,
            avoid=failed,
            hashes=names,
        )

    def _submission(
        self,
        request: gateway_pb2.GenerateRequest,
        call: Call,
        description: worker_pb2.ModelDescription,
        token_ids: Sequence[int],
        time_remaining: float | None,
    ) -> worker_pb2.Submit:
        submit = worker_pb2.Submit(
            tenant=call.tenant,
            request_id=call.request_id,
            sampling=complete_sampling(request, len(token_ids), description, call.charge.limits),
            # From message to message, ids are copied as a whole and not one by one.
            token_ids=request.token_ids.ids or token_ids,
            n=num_outputs(request),
            cache=request.cache,
        )
        if time_remaining is not None:
            if time_remaining <= 0:
                raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the call began")
            submit.deadline_seconds = time_remaining
        if request.HasField("priority"):
            submit.priority = request.priority
        if request.HasField("time_limit_ms"):
            # What encoding took is taken off. Never less than one: the worker ends the call then, and answers.
            submit.time_limit_ms = max(1, request.time_limit_ms - int(call.age_seconds * 1e3))
        return submit


def _describe(
    call: Call,
    request: gateway_pb2.GenerateRequest,
    submit: worker_pb2.Submit,
    description: worker_pb2.ModelDescription,
) -> None:
    """Note what is asked for, for the call's line in the log and its trace."""
    record = call.record
    record.model = description.model
    record.operation = "chat" if request.WhichOneof("input") == "chat" else "text_completion"
    record.sampling, record.outputs = submit.sampling, submit.n
