"""One generation: from a checked request, over the worker, to deltas of text and one end."""

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

import grpc

from prefixgate.gateway import metrics as table
from prefixgate.gateway.errors import CallError, worker_error
from prefixgate.gateway.live_calls import Call
from prefixgate.gateway.metrics import GatewayMetrics
from prefixgate.gateway.output_text import OutputText
from prefixgate.gateway.prompt_encoder import PromptEncoder
from prefixgate.gateway.stop import StopStrings
from prefixgate.gateway.validation import Limits, check_request, complete_sampling, num_outputs
from prefixgate.gateway.worker_call import WorkerCall
from prefixgate.gateway.worker_client import Connection
from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2


class Generator:
    """Runs generations on whichever worker serves when they begin."""

    def __init__(
        self,
        connection: Callable[[], Connection],
        encoder: PromptEncoder,
        metrics: GatewayMetrics,
        limits: Limits,
    ) -> None:
        """``connection`` returns the worker to use, or raises NoWorkerError."""
        self._connection = connection
        self._encoder = encoder
        self._metrics = metrics
        self._limits = limits

    async def run(
        self, request: gateway_pb2.GenerateRequest, call: Call, time_remaining: Callable[[], float | None]
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        """Yield the messages of a call, the last with ``completion``. Close the iterator to cancel at the worker.

        ``time_remaining`` tells the seconds to the client's deadline, None without one. Raises FieldError and
        CallError; what ends without ``completion`` has always raised.
        """
        connection = self._connection()
        description = connection.model.description
        check_request(request, description, self._limits)
        token_ids = await self._encoder.encode(request, connection.model)
        submit = self._submission(request, call, description, token_ids, time_remaining())
        stops = StopStrings(request.stop)
        outputs = [OutputText(index, connection.model.pieces, stops) for index in range(submit.n)]
        progress = _Progress(self._metrics, call, submit.n)
        # Last, so that nothing can fail between the call's start at the worker and the promise to end it there.
        worker_call = connection.session.submit(submit)
        try:
            while True:
                event = await worker_call.receive()
                deltas = list(_deltas(event, outputs, worker_call))
                progress.record(deltas)
                if deltas or event.prompt_logprobs:
                    yield gateway_pb2.GenerateResponse(deltas=deltas, prompt_logprobs=event.prompt_logprobs)
                if event.HasField("end"):
                    progress.record_usage(event.end)
                    _check_end(event.end, outputs)
                    yield gateway_pb2.GenerateResponse(completion=_completion(event.end, call, description))
                    return
        finally:
            worker_call.close()

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
            sampling=complete_sampling(request, len(token_ids), description, self._limits),
            token_ids=token_ids,
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


def _completion(
    end: worker_pb2.CallEnd, call: Call, description: worker_pb2.ModelDescription
) -> gateway_pb2.Completion:
    return gateway_pb2.Completion(
        usage=end.usage,
        request_id=call.request_id,
        model=description.model,
        incarnation=description.incarnation,
    )


def _deltas(
    event: worker_pb2.CallEvent, outputs: Sequence[OutputText], worker_call: WorkerCall
) -> Iterable[gateway_pb2.OutputDelta]:
    for news in event.outputs:
        if news.index >= len(outputs):
            raise CallError(grpc.StatusCode.INTERNAL, f"the worker sent output {news.index}, which was not asked for")
        delta = outputs[news.index].push(news)
        if delta is None:
            continue
        if delta.matched_stop and not news.finish_reason:
            worker_call.cancel_output(news.index)
        yield delta


def _check_end(end: worker_pb2.CallEnd, outputs: Iterable[OutputText]) -> None:
    if end.code != grpc.StatusCode.OK.value[0]:
        raise worker_error(end.code, end.message, end.retry_seconds)
    unfinished = [output.index for output in outputs if not output.is_finished]
    if unfinished:
        raise CallError(grpc.StatusCode.INTERNAL, f"the worker ended the call without an end of outputs {unfinished}")


class _Progress:
    """Counts what becomes true of one call, when it does."""

    def __init__(self, metrics: GatewayMetrics, call: Call, outputs: int) -> None:
        self._metrics = metrics
        self._call = call
        self._last_at = [0.0] * outputs
        self._has_token = False

    def record(self, deltas: Iterable[gateway_pb2.OutputDelta]) -> None:
        now, tenant = time.monotonic(), self._call.tenant
        for delta in deltas:
            if delta.token_ids:
                self._record_tokens(delta, now)
            if delta.finish_reason:
                reason = "stop_string" if delta.matched_stop else _REASONS.get(delta.finish_reason, "other")
                self._metrics.count(table.OUTPUTS_FINISHED, tenant, reason)

    def _record_tokens(self, delta: gateway_pb2.OutputDelta, now: float) -> None:
        tenant = self._call.tenant
        self._metrics.count(table.COMPLETION_TOKENS, tenant, amount=len(delta.token_ids))
        if not self._has_token:
            self._has_token = True
            self._metrics.observe(table.FIRST_TOKEN, tenant, seconds=now - self._call.started_at)
        if self._last_at[delta.index]:
            self._metrics.observe(table.TOKEN_GAP, tenant, seconds=now - self._last_at[delta.index])
        self._last_at[delta.index] = now

    def record_usage(self, end: worker_pb2.CallEnd) -> None:
        usage, tenant = end.usage, self._call.tenant
        self._metrics.count(table.PROMPT_TOKENS, tenant, amount=usage.prompt_tokens)
        for source in ("block_hit", "partial_copy", "claimed_tail"):
            self._metrics.count(table.CACHED_TOKENS, tenant, source, amount=getattr(usage, f"{source}_tokens"))


_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_TIME_LIMIT: "time_limit",
}
