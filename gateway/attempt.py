"""A call in the hands of one worker: from its submit to its end, as messages for the client."""

import time
from collections.abc import Iterable, Sequence

import grpc

from prefixgate.gateway import metrics as table
from prefixgate.gateway.call_end import check_end, completion, record_usage
from prefixgate.gateway.errors import CallError
from prefixgate.gateway.live_calls import Call
from prefixgate.gateway.member import Placement
from prefixgate.gateway.metrics import GatewayMetrics
from prefixgate.gateway.output_text import OutputText
from prefixgate.gateway.stop import StopStrings
from prefixgate.gateway.worker_call import WorkerCall
from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2


class Attempt:
    """One try to have a call answered. ``close`` is due on every path."""

    def __init__(
        self,
        request: gateway_pb2.GenerateRequest,
        submit: worker_pb2.Submit,
        call: Call,
        placement: Placement,
        metrics: GatewayMetrics,
    ) -> None:
        """Submit the call. Raises NoWorkerError."""
        model = placement.connection.model
        stops = StopStrings(request.stop)
        self.is_told = False
        """Whether the client has got anything of it."""
        self.has_ended = False
        """Whether the last message was the one with ``completion``."""
        self._metrics = metrics
        self._call = call
        self._placement = placement
        self._description = model.description
        self._outputs = [OutputText(index, model.pieces, stops) for index in range(submit.n)]
        self._progress = _Progress(metrics, call, submit.n)
        self._end: worker_pb2.CallEnd | None = None
        call.record.worker, call.record.attempts = placement.worker, call.record.attempts + 1
        self._trace = call.trace.attempt(submit, placement.choice)
        # Last, so that nothing can fail between the call's start at the worker and the promise to end it there.
        self._worker_call = placement.connection.session.submit(submit)

    async def receive(self) -> gateway_pb2.GenerateResponse:
        """Wait for the next message for the client. Raises CallError, after all that came before the failure."""
        try:
            return await self._receive()
        except CallError as error:
            self._trace.end(error.code.name)
            raise

    async def _receive(self) -> gateway_pb2.GenerateResponse:
        while self._end is None:
            event = await self._worker_call.receive()
            if event.outputs or event.prompt_logprobs:
                self._placement.answered()
            deltas = list(_deltas(event, self._outputs, self._worker_call))
            self._progress.record(deltas)
            if event.HasField("end"):
                self._end = event.end
            if deltas or event.prompt_logprobs:
                return gateway_pb2.GenerateResponse(deltas=deltas, prompt_logprobs=event.prompt_logprobs)
        record_usage(self._metrics, self._call, self._placement.choice, self._end)
        self._check_end(self._end)
        self.has_ended = True
        return gateway_pb2.GenerateResponse(completion=completion(self._end, self._call, self._description))

    def close(self) -> None:
        """Have the worker give up what has not ended. Once."""
        self._call.charge.abandon(self._worker_call.num_untaken)
        self._worker_call.close()
        self._trace.end("" if self.has_ended else grpc.StatusCode.CANCELLED.name)

    def _check_end(self, end: worker_pb2.CallEnd) -> None:
        check_end(end, self._placement)
        self._placement.ended(end.usage)
        unfinished = [output.index for output in self._outputs if not output.is_finished]
        if unfinished:
            message = f"the worker ended the call without an end of outputs {unfinished}"
            raise CallError(grpc.StatusCode.INTERNAL, message)


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


class _Progress:
    """Counts what becomes true of one call, when it does."""

    def __init__(self, metrics: GatewayMetrics, call: Call, outputs: int) -> None:
        self._metrics = metrics
        self._call = call
        self._last_at = [0.0] * outputs
        self._has_token = False
        call.awaits_token = True

    def record(self, deltas: Iterable[gateway_pb2.OutputDelta]) -> None:
        now, tenant = time.monotonic(), self._call.tenant
        for delta in deltas:
            if delta.token_ids:
                self._call.charge.deliver(len(delta.token_ids))
                self._call.record.received_tokens += len(delta.token_ids)
                self._record_tokens(delta, now)
            if delta.finish_reason:
                reason = "stop_string" if delta.matched_stop else _REASONS.get(delta.finish_reason, "other")
                self._metrics.count(table.OUTPUTS_FINISHED, tenant, reason)
                self._call.record.finish_reasons[delta.index] = reason

    def _record_tokens(self, delta: gateway_pb2.OutputDelta, now: float) -> None:
        tenant = self._call.tenant
        self._metrics.count(table.COMPLETION_TOKENS, tenant, amount=len(delta.token_ids))
        if not self._has_token:
            self._has_token = True
            self._call.awaits_token = False
            self._call.record.first_token_seconds = seconds = now - self._call.started_at
            self._metrics.observe(table.FIRST_TOKEN, tenant, seconds=seconds)
        if self._last_at[delta.index]:
            self._metrics.observe(table.TOKEN_GAP, tenant, seconds=now - self._last_at[delta.index])
        self._last_at[delta.index] = now


_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_TIME_LIMIT: "time_limit",
}
