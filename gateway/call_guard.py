"""The guard at the door: no method runs without a credential, and bytes that are no request are the client's fault."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from prefixgate.gateway.auth import Metadata, Peer, UnauthenticatedError
from prefixgate.gateway.metrics import CALLS_REFUSED, GatewayMetrics

logger = logging.getLogger(__name__)

# In quotes, since only the type hints make them generic.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_OPEN_PREFIX = "/grpc.health.v1.Health/"
"""All that can be called without a credential: who asks for health holds no key."""


class CallGuard(grpc.aio.ServerInterceptor):
    """Denies whatever proves no tenant, methods that do not exist included, and names the tenant of what goes on.

    What a certificate proves can be seen only from within a call. So each call runs in a handler of the guard's, of the
    kind that waits for no message: whoever proves nothing is refused before a byte of a request is taken, and also
    when none ever comes. On the wire all four kinds of method are the same.
    """

    def __init__(self, authenticate: Callable[[Metadata, Peer], str], metrics: GatewayMetrics) -> None:
        self._authenticate = authenticate
        self._metrics = metrics
        self._tenant: ContextVar[str] = ContextVar("tenant")

    def tenant(self) -> str:
        """Name the tenant of the call that is running."""
        return self._tenant.get()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Find the handler of a call, and put the guard before it."""
        handler = await continuation(handler_call_details)
        if handler_call_details.method.startswith(_OPEN_PREFIX):
            return handler
        metadata = handler_call_details.invocation_metadata

        async def guarded(requests: AsyncIterator[bytes], context: Context) -> None:
            await self._admit(metadata, context)
            if handler is None:
                await self._refuse(context, grpc.StatusCode.UNIMPLEMENTED, "there is no such method")
            else:
                await self._run(handler, requests, context)

        serializer = None if handler is None else handler.response_serializer
        return grpc.stream_stream_rpc_method_handler(guarded, None, serializer)

    async def _admit(self, metadata: Metadata, context: Context) -> None:
        try:
            # Guard and handler run in one task, so that the handler finds this.
            self._tenant.set(self._authenticate(metadata, context.auth_context()))
        except UnauthenticatedError as error:
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
        except Exception:
            logger.exception("Authentication failed by itself; the call is refused")
            await self._refuse(context, grpc.StatusCode.INTERNAL, "internal error while checking the credential")

    async def _run(self, handler: Any, requests: AsyncIterator[bytes], context: Context) -> None:
        """Run a method of whichever kind on what comes."""
        # Coroutine functions or asynchronous generators all, which the type hints know of synchronous servers only.
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if handler.request_streaming:
            argument = self._readable(handler, requests, context)
        else:
            data = await anext(requests, None)
            if data is None:
                await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the call holds no request")
            argument = await self._read(handler, data, context)
        answer = behavior(argument, context)
        if hasattr(answer, "__aiter__"):
            async with aclosing(answer):
                async for response in answer:
                    await _write(context, response)
        elif (response := await answer) is not None:
            await _write(context, response)

    async def _readable(self, handler: Any, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        async for data in requests:
            yield await self._read(handler, data, context)

    async def _read(self, handler: Any, data: bytes, context: Context) -> Any:
        """Read a request; gRPC by itself would answer what cannot be read with UNKNOWN."""
        try:
            return handler.request_deserializer(data) if handler.request_deserializer else data
        except DecodeError as error:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"the request cannot be read: {error}")

    async def _refuse(self, context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
        """End the call."""
        self._metrics.count(CALLS_REFUSED, code.name)
        await context.abort(code, message)


async def _write(context: Context, response: Any) -> None:
    try:
        await context.write(response)
    except grpc.aio.InternalError as unsent:
        # The client went away or ran into its deadline, and this task has not been told yet. No fault of anybody's,
        # which gRPC would log with a traceback.
        raise asyncio.CancelledError from unsent
