"""The synchronous client."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from prefixgate.gateway.client.answer import Answer, answer_of
from prefixgate.gateway.client.attempts import RetryPolicy
from prefixgate.gateway.client.errors import error_of
from prefixgate.gateway.client.options import GenerateOptions, LookupOptions, WarmOptions
from prefixgate.gateway.client.parts import PartialWarm
from prefixgate.gateway.client.prompt import Conversation, Prompt
from prefixgate.gateway.client.requests import (
    explain_request,
    generate_request,
    pin_request,
    tokenize_request,
    warm_request,
)
from prefixgate.gateway.client.stream import AnswerStream, WarmStream
from prefixgate.gateway.client.terms import CLIENT_CHANNEL_OPTIONS, DEFAULT_ADDRESS, Terms
from prefixgate.gateway.client.tls import Tls
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc
from prefixgate.proto.transport import IN_THE_CLEAR

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class Client:
    """Calls a gateway. May be used by several threads.

    Every method takes a ``timeout`` in seconds, which is the call's deadline with all its attempts, and raises
    GatewayError. Options stand in ``gateway.proto`` and ``generation.proto`` under the same names.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str = "",
        tls: Tls | None = None,
        timeout: float | None = None,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 (it is frozen)
    ) -> None:
        """Connect at the first call. ``address`` is HOST:PORT, unix:/PATH or another target that gRPC knows.

        ``timeout`` is for calls that set none. Without ``tls`` nothing is encrypted, the API key included, and no proxy
        is used.
        """
        self._terms = Terms(api_key, timeout, retry)
        self._channel = (
            grpc.insecure_channel(address, (*CLIENT_CHANNEL_OPTIONS, *IN_THE_CLEAR))
            if tls is None
            else grpc.secure_channel(address, tls.credentials(), CLIENT_CHANNEL_OPTIONS)
        )
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)

    def close(self) -> None:
        """Close the connection, and cancel what still runs on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AnswerStream:
        """Generate, and stream the answer as it comes."""
        return self._answer(generate_request(prompt, options), timeout)

    def complete(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]) -> Answer:
        """Generate, and give the answer when it is whole."""
        return answer_of(self._call(self._stub.Complete, generate_request(prompt, options), timeout))

    def chat(
        self,
        conversation: Conversation,
        question: str,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AnswerStream:
        """Ask the next question of a conversation, and stream the answer.

        Both are added to the conversation once the answer has come to its end; before, it stays as it was.
        """
        request = generate_request(conversation.asking(question), options)
        return self._answer(request, timeout, lambda answer: conversation.add(question, answer))

    def tokenize(self, prompt: Prompt, *, timeout: float | None = None) -> list[int]:
        """Give the token ids that a generation from this text or these messages would begin with."""
        return list(self._call(self._stub.Tokenize, tokenize_request(prompt), timeout).token_ids)

    def stats(self, *, timeout: float | None = None) -> gateway_pb2.StatsResponse:
        """Tell what is served, and how pool and queue stand."""
        return self._call(self._stub.Stats, gateway_pb2.StatsRequest(), timeout)

    def explain(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[LookupOptions]
    ) -> gateway_pb2.ExplainResponse:
        """Tell how much of a prompt is cached, and why the first token that is not, is not. Changes nothing."""
        return self._call(self._stub.Explain, explain_request(prompt, options), timeout)

    def warm(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[WarmOptions]) -> WarmStream:
        """Compute a prompt into the cache without generating, and tell how far it is."""
        request, attempts = warm_request(prompt, options), self._terms.attempts(timeout)
        return WarmStream(
            lambda seconds: self._stub.Warm(request, timeout=seconds, metadata=self._terms.metadata),
            attempts,
            PartialWarm(),
        )

    def pin(
        self, prompt: Prompt, ttl_seconds: float, *, timeout: float | None = None, **options: Unpack[LookupOptions]
    ) -> gateway_pb2.PinResponse:
        """Keep what is cached of a prompt for some seconds, whatever else comes."""
        return self._call(self._stub.Pin, pin_request(prompt, ttl_seconds, options), timeout)

    def unpin(self, pin_id: str, *, timeout: float | None = None) -> None:
        """End a pin before its time."""
        self._call(self._stub.Unpin, gateway_pb2.UnpinRequest(pin_id=pin_id), timeout)

    def list_pins(self, *, timeout: float | None = None) -> Sequence[gateway_pb2.PinnedPrefix]:
        """List the tenant's pins, soonest to end first."""
        return self._call(self._stub.ListPins, gateway_pb2.ListPinsRequest(), timeout).pins

    def flush(self, *, salt: str | None = None, timeout: float | None = None) -> gateway_pb2.FlushResponse:
        """Forget what is cached for the tenant, or for one of its salts."""
        return self._call(self._stub.Flush, gateway_pb2.FlushRequest(salt=salt), timeout)

    def _answer(
        self,
        request: gateway_pb2.GenerateRequest,
        timeout: float | None,
        on_end: Callable[[str], None] | None = None,
    ) -> AnswerStream:
        return AnswerStream(
            lambda seconds: self._stub.Generate(request, timeout=seconds, metadata=self._terms.metadata),
            self._terms.attempts(timeout),
            on_end,
        )

    def _call(
        self, method: "grpc.UnaryUnaryMultiCallable[RequestT, ResponseT]", request: RequestT, timeout: float | None
    ) -> ResponseT:
        attempts = self._terms.attempts(timeout)
        while True:
            try:
                return method(request, timeout=attempts.remaining(), metadata=self._terms.metadata)
            except grpc.RpcError as error:
                failure = error_of(error)
                if (wait := attempts.wait_after(failure)) is None:
                    raise failure from error
                time.sleep(wait)
