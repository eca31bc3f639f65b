"""A bare grpc.aio server that passes a stream on and does nothing else: what a gateway in Python costs at the least.

    python -m benchmarks.pass_through LISTEN TARGET

It knows the name of the one stream that the benchmark sends through it, and nothing of what is in it: requests and
responses are bytes. It says ``ready`` when it serves, and ends with its standard input.
"""

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio

from prefixgate.proto.transport import CHANNEL_OPTIONS, SERVER_OPTIONS

GENERATE = "/prefixgate.v1.Gateway/Generate"


class PassThrough(grpc.GenericRpcHandler):
    """Opens a stream of the same name to the target for each that comes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(GENERATE)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        if handler_call_details.method == GENERATE:
            return grpc.unary_stream_rpc_method_handler(self._pass_on)
        return None

    async def _pass_on(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async for message in self._generate(request, metadata=_credential(context)):
            await context.write(message)


def _credential(context: Any) -> Any:
    """Pick what proves who calls."""
    return tuple((key, value) for key, value in context.invocation_metadata() or () if key == "authorization")


async def serve(listen: str, target: str) -> None:
    """Serve until standard input ends."""
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((PassThrough(channel),))
        server.add_insecure_port(listen)
        await server.start()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(0)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:3]))
