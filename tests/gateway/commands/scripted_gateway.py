"""A gateway on a Unix socket that answers what a test has written down."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from prefixgate.proto import gateway_pb2, generation_pb2
from prefixgate.proto.transport import SERVER_OPTIONS

SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"]
USAGE = generation_pb2.Usage(
    prompt_tokens=50,
    cached_tokens=42,
    block_hit_tokens=32,
    partial_copy_tokens=10,
    copied_blocks=3,
    completion_tokens=7,
    queue_seconds=0.25,
    first_token_seconds=0.5,
)
END = gateway_pb2.GenerateResponse(
    completion=gateway_pb2.Completion(usage=USAGE, request_id="r1", model="m", incarnation="i")
)


class ScriptedGateway:
    """Streams a script of messages, then as told: the end of the stream, an error, or nothing for ever.

    What is not streamed is answered from ``answers``, by the method's name.
    """

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.scripts: list[list[Any]] = []
        """One for each of several calls; where these are used up, ``script`` is played."""
        self.answers: dict[str, Message] = {}
        self.error: tuple[grpc.StatusCode, str] | None = None
        self.hangs = False
        self.requests: list[Any] = []
        self.credentials: list[str | bytes | None] = []
        self.ended = threading.Event()

    def handler(self, method: MethodDescriptor) -> Any:
        """Make gRPC's handler of a method."""

        def stream(request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
            self._note(request, context)
            yield from self.scripts.pop(0) if self.scripts else self.script
            if self.hangs:
                self.ended.wait()
            self._fail(context)

        def answer(request: Message, context: grpc.ServicerContext) -> Message:
            self._note(request, context)
            self._fail(context)
            return self.answers[method.name]

        make: Any = grpc.unary_unary_rpc_method_handler
        if method.server_streaming:
            make = grpc.unary_stream_rpc_method_handler
        return make(
            stream if method.server_streaming else answer,
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )

    def _note(self, request: Message, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.credentials.append(dict(context.invocation_metadata()).get("authorization"))
        context.add_callback(self.ended.set)

    def _fail(self, context: grpc.ServicerContext) -> None:
        if self.error is not None:
            context.abort(*self.error)


@contextmanager
def scripted(socket: str) -> Iterator[ScriptedGateway]:
    """Serve a scripted gateway."""
    server = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
    servicer = ScriptedGateway()
    handlers = {method.name: servicer.handler(method) for method in SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
    server.add_insecure_port(socket)
    server.start()
    try:
        yield servicer
    finally:
        servicer.ended.set()
        server.stop(None).wait()


def delta(
    text: str, *ids: int, index: int = 0, reason: generation_pb2.FinishReason = generation_pb2.FINISH_REASON_UNSPECIFIED
) -> gateway_pb2.OutputDelta:
    """Make a delta."""
    return gateway_pb2.OutputDelta(index=index, text=text, token_ids=ids, finish_reason=reason)


def saying(*texts: str) -> list[Any]:
    """Make the script of an answer that says some texts."""
    return [*(gateway_pb2.GenerateResponse(deltas=[delta(text, 1)]) for text in texts), END]
