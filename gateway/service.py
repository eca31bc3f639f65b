"""The public API's methods: each only translates."""

from contextlib import aclosing

from prefixgate.gateway.cache_control import CacheControl
from prefixgate.gateway.call_boundary import CallBoundary, Context
from prefixgate.gateway.fleet import Fleet
from prefixgate.gateway.generation import Generator
from prefixgate.gateway.outflow import Outflow
from prefixgate.gateway.output_text import whole
from prefixgate.gateway.prompt_encoder import PromptEncoder
from prefixgate.gateway.validation import check_request, num_outputs
from prefixgate.gateway.warming import Warmer
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc


class GatewayService(gateway_pb2_grpc.GatewayServicer):
    """All methods of the gateway."""

    def __init__(
        self,
        boundary: CallBoundary,
        generator: Generator,
        encoder: PromptEncoder,
        fleet: Fleet,
        control: CacheControl,
        warmer: Warmer,
    ) -> None:
        self._boundary = boundary
        self._generator = generator
        self._encoder = encoder
        self._fleet = fleet
        self._control = control
        self._warmer = warmer

    # A coroutine that writes, where the generated base has an iterator: an iterator that its reader drops is closed
    # when the garbage collector comes to it, and until then nobody cancels the call at the worker.
    async def Generate(  # type: ignore[override]
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream the deltas, then the completion."""
        async with self._boundary.call("Generate", context, request.request_id) as call:
            await Outflow(self._generator.run(request, call, context.time_remaining)).run(context.write)

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
        async with self._boundary.call("Tokenize", context) as call:
            model = self._fleet.model
            check_request(request, model.description, call.charge.limits)
            answer.token_ids.extend(await self._encoder.encode(request, model, call))
        return answer

    # Cache control. What is asked and answered fits into one message, but for a Warm's progress.

    async def Stats(self, request: gateway_pb2.StatsRequest, context: Context) -> gateway_pb2.StatsResponse:
        """Say what is served and how the tenant stands."""
        answer = gateway_pb2.StatsResponse()
        async with self._boundary.call("Stats", context) as call:
            answer.MergeFrom(await self._control.stats(request, call))
        return answer

    async def Explain(self, request: gateway_pb2.ExplainRequest, context: Context) -> gateway_pb2.ExplainResponse:
        """Say where a prompt leaves the cache, and why."""
        answer = gateway_pb2.ExplainResponse()
        async with self._boundary.call("Explain", context, request.request_id) as call:
            answer.MergeFrom(await self._control.explain(request, call))
        return answer

    async def Warm(  # type: ignore[override]
        self, request: gateway_pb2.WarmRequest, context: Context
    ) -> None:
        """Stream how far the prompt is, then the completion."""
        async with (
            self._boundary.call("Warm", context, request.request_id) as call,
            aclosing(self._warmer.run(request, call, context.time_remaining)) as responses,
        ):
            async for response in responses:
                await context.write(response)

    async def Pin(self, request: gateway_pb2.PinRequest, context: Context) -> gateway_pb2.PinResponse:
        """Keep what is cached of a prompt for a time."""
        answer = gateway_pb2.PinResponse()
        async with self._boundary.call("Pin", context, request.request_id) as call:
            answer.MergeFrom(await self._control.pin(request, call))
        return answer

    async def Unpin(self, request: gateway_pb2.UnpinRequest, context: Context) -> gateway_pb2.UnpinResponse:
        """End a pin before its time."""
        async with self._boundary.call("Unpin", context) as call:
            await self._control.unpin(request, call)
        return gateway_pb2.UnpinResponse()

    async def ListPins(self, request: gateway_pb2.ListPinsRequest, context: Context) -> gateway_pb2.ListPinsResponse:
        """List the tenant's pins."""
        answer = gateway_pb2.ListPinsResponse()
        async with self._boundary.call("ListPins", context) as call:
            answer.MergeFrom(await self._control.list_pins(request, call))
        return answer

    async def Flush(self, request: gateway_pb2.FlushRequest, context: Context) -> gateway_pb2.FlushResponse:
        """Forget what is cached for the tenant."""
        answer = gateway_pb2.FlushResponse()
        async with self._boundary.call("Flush", context) as call:
            answer.MergeFrom(await self._control.flush(request, call))
        return answer
