"""The guard at the door: no method runs without a credential, and bytes that are no request are the client's fault."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from prefixgate.gateway.auth import UnauthenticatedError
from prefixgate.gateway.metrics import CALLS_REFUSED, GatewayMetrics

logger = logging.getLogger(__name__)

Metadata = Sequence[tuple[str, str | bytes]]
# In quotes, since only the type hints make it generic.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"

_OPEN_PREFIX = "/grpc.health.v1.Health/"
"""All that can be called without a credential: who asks for health holds no key."""


class CallGuard(grpc.aio.ServerInterceptor):
    """Denies whatever proves no tenant, methods that do not exist included, and names the tenant of what goes on."""

    def __init__(self, authenticate: Callable[[Metadata], str], metrics: GatewayMetrics) -> None:
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
        """Find the handler of a call, or one that refuses it."""
        if handler_call_details.method.startswith(_OPEN_PREFIX):
            return await continuation(handler_call_details)
        try:
            # Handler and interceptor run in one task, so that the handler finds this.
            self._tenant.set(self._authenticate(handler_call_details.invocation_metadata))
        except UnauthenticatedError as error:
            return self._refusal(grpc.StatusCode.UNAUTHENTICATED, str(error))
        except Exception:
            logger.exception("Authentication failed by itself; the call is refused")
            return self._refusal(grpc.StatusCode.INTERNAL, "internal error while checking the credential")
        return self._tolerant(await continuation(handler_call_details))

    def _refusal(self, code: grpc.StatusCode, message: str) -> Handler:
        async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(code, message)

        self._metrics.count(CALLS_REFUSED, code.name)
        # Of the kind that waits for no message, whatever kind the method is: a client may never send one.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _tolerant(self, handler: Handler) -> Handler:
        """Wrap a handler of single requests so that a request it cannot read is refused; gRPC would say UNKNOWN."""
        if handler is None or handler.request_deserializer is None or handler.request_streaming:
            return handler
        read = handler.request_deserializer
        # Coroutine functions both, which the type hints know of synchronous servers only.
        behavior: Any = handler.unary_stream or handler.unary_unary

        def read_or_error(data: bytes) -> Any:
            try:
                return read(data)
            except DecodeError as error:
                return error

        async def run(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if isinstance(request, DecodeError):
                self._metrics.count(CALLS_REFUSED, grpc.StatusCode.INVALID_ARGUMENT.name)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request cannot be read: {request}")
            return await behavior(request, context)

        make = grpc.unary_stream_rpc_method_handler if handler.unary_stream else grpc.unary_unary_rpc_method_handler
        return make(run, read_or_error, handler.response_serializer)
