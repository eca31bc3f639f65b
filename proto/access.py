"""How a gateway proves to a worker that it is one: by a secret that only who has the hash key can make.

Whoever may call a worker can act for any tenant, so a worker answers nobody else, whatever socket the call comes by.
"""

import hmac
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

ACCESS_PURPOSE = b"gateway access"
"""What the secret is derived for, of the hash key."""

_METADATA_KEY = "prefixgate-access-bin"
_OPEN_PREFIX = "/grpc.health.v1.Health/"
"""All that is answered without it: whoever asks for health is no gateway."""

# In quotes, since only the type hints make it generic.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


def proving(channel: grpc.aio.Channel, secret: bytes) -> grpc.aio.Channel:
    """Return a channel for the generated stubs on which each call shows the secret. It is the other's to close."""
    wrapped: Any = _ProvingChannel(channel, secret)
    return cast(grpc.aio.Channel, wrapped)


class _ProvingChannel:
    """Has what the stubs ask of a channel. Interceptors would do the same, at a cost for each message."""

    def __init__(self, channel: grpc.aio.Channel, secret: bytes) -> None:
        self._channel = channel
        self._metadata = ((_METADATA_KEY, secret),)

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        # unary_unary, stream_stream and the two between them.
        make = getattr(self._channel, kind)
        return lambda *arguments, **options: partial(make(*arguments, **options), metadata=self._metadata)


class AccessGuard(grpc.aio.ServerInterceptor):
    """Refuses every method of a worker but health to whoever does not show the secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Find the handler of a call, or one that refuses it."""
        if handler_call_details.method.startswith(_OPEN_PREFIX):
            return await continuation(handler_call_details)
        shown = [value for key, value in handler_call_details.invocation_metadata if key == _METADATA_KEY]
        # In constant time, so that the time taken tells nothing about the secret.
        if len(shown) == 1 and isinstance(shown[0], bytes) and hmac.compare_digest(shown[0], self._secret):
            return await continuation(handler_call_details)
        # Of the kind that waits for no message, whatever kind the method is.
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "only a gateway with this worker's hash key is answered; is hash_key the same for both?",
    )
