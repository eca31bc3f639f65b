"""The public API's methods: each only translates."""

from collections.abc import Sequence
from contextlib import aclosing

from prefixgate.gateway.call_boundary import CallBoundary, Context
from prefixgate.gateway.fleet import Fleet
from prefixgate.gateway.generation import Generator
from prefixgate.gateway.output_text import whole
from prefixgate.gateway.prompt_encoder import PromptEncoder
from prefixgate.gateway.validation import Limits, check_request, num_outputs
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, worker_pb2


class GatewayService(gateway_pb2_grpc.GatewayServicer):
    """Generate, Complete, Tokenize and Stats."""

    def __init__(
        self,
        boundary: CallBoundary,
        generator: Generator,
        encoder: PromptEncoder,
        fleet: Fleet,
        limits: Limits,
    ) -> None:
        self._boundary = boundary
        self._generator = generator
        self._encoder = encoder
        self._fleet = fleet
        self._limits = limits

    # A coroutine that writes, where the generated base has an iterator: an iterator that its reader drops is closed
    # when the garbage collector comes to it, and until then nobody cancels the call at the worker.
    async def Generate(  # type: ignore[override]
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream the deltas, then the completion."""
        async with (
            self._boundary.call("Generate", context, request.request_id) as call,
            aclosing(self._generator.run(request, call, context.time_remaining)) as responses,
        ):
            async for response in responses:
                await context.write(response)

    async def Complete(self, request: gateway_pb2.GenerateRequest, context: Context) -> gateway_pb2.CompleteResponse:
        """Answer whole: the same generation as Generate's, put together."""
        answer = gateway_pb2.CompleteResponse()
        async with self._boundary.call("Complete", context, request.request_id) as call:
            deltas: list[gateway_pb2.OutputDelta] = []
            async with aclosing(self._generator.run(request, call, context.time_remaining)) as responses:
                async for response in responses:
                    deltas += response.deltas
                    answer.prompt_logprobs.extend(response.prompt_logprobs)
                    if response.HasField("completion"):
                        answer.completion.CopyFrom(response.completion)
            answer.outputs.extend(whole(num_outputs(request), deltas))
        return answer

    async def Tokenize(self, request: gateway_pb2.TokenizeRequest, context: Context) -> gateway_pb2.TokenizeResponse:
        """Encode an input as Generate would."""
        answer = gateway_pb2.TokenizeResponse()
        async with self._boundary.call("Tokenize", context):
            model = self._fleet.model
            check_request(request, model.description, self._limits)
            answer.token_ids.extend(await self._encoder.encode(request, model))
        return answer

    async def Stats(self, request: gateway_pb2.StatsRequest, context: Context) -> gateway_pb2.StatsResponse:
        """Say what is served and how the worker stands."""
        answer = gateway_pb2.StatsResponse()
        async with self._boundary.call("Stats", context) as call:
            answer.MergeFrom(_stats(self._fleet.model.description, await self._fleet.reports(call.tenant)))
        return answer


def _stats(model: worker_pb2.ModelDescription, reports: Sequence[worker_pb2.WorkerReport]) -> gateway_pb2.StatsResponse:
    """Add up what the workers say."""
    stats = gateway_pb2.StatsResponse(
        model=model.model,
        model_fingerprint=model.fingerprint,
        context_length=model.context_length,
        incarnation=reports[0].incarnation if len(reports) == 1 else "",
        running_calls=sum(report.running_calls for report in reports),
        waiting_calls=sum(report.waiting_calls for report in reports),
        queried_tokens=sum(report.queried_tokens for report in reports),
        hit_tokens=sum(report.hit_tokens for report in reports),
    )
    stats.pool.block_size = model.block_size
    for name in ("total_blocks", "free_blocks", "active_blocks", "cached_blocks"):
        setattr(stats.pool, name, sum(getattr(report.pool, name) for report in reports))
    return stats
