"""Bytes that are no message of the protocol end their call with INVALID_ARGUMENT; gRPC by itself would say UNKNOWN."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

# In quotes, since only the type hints make it generic.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class ReadableRequests(grpc.aio.ServerInterceptor):
    """Reads the requests of all methods in the place of gRPC."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Find the handler of a call, and put the reading before it."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        def read(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError as error:
                return error

        async def run(argument: Any, context: Context) -> Any:
            argument = _all_of(argument, context) if handler.request_streaming else await _checked(argument, context)
            answer = behavior(argument, context)
            if not hasattr(answer, "__aiter__"):
                return await answer
            async with aclosing(answer):
                async for response in answer:
                    await context.write(response)
            return None

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(run, read, handler.response_serializer)


async def _all_of(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
    async for request in requests:
        yield await _checked(request, context)


async def _checked(request: Any, context: Context) -> Any:
    if isinstance(request, DecodeError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request cannot be read: {request}")
    return request
