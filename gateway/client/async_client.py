"""The asynchronous client."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio

from prefixgate.gateway.client.answer import Answer, answer_of
from prefixgate.gateway.client.async_stream import AsyncAnswerStream, AsyncWarmStream, is_task_cancelled
from prefixgate.gateway.client.attempts import RetryPolicy
from prefixgate.gateway.client.errors import error_of, make_error
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
from prefixgate.gateway.client.terms import CLIENT_CHANNEL_OPTIONS, DEFAULT_ADDRESS, Terms
from prefixgate.gateway.client.tls import Tls
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc
from prefixgate.proto.transport import IN_THE_CLEAR

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class AsyncClient:
    """Calls a gateway. Belongs to the event loop in which it is made.

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
            grpc.aio.insecure_channel(address, (*CLIENT_CHANNEL_OPTIONS, *IN_THE_CLEAR))
            if tls is None
            else grpc.aio.secure_channel(address, tls.credentials(), CLIENT_CHANNEL_OPTIONS)
        )
        self._stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(self._channel)

    async def close(self) -> None:
        """Close the connection, and cancel what still runs on it."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncAnswerStream:
        """Generate, and stream the answer as it comes."""
        return self._answer(generate_request(prompt, options), timeout)

    async def complete(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """Generate, and give the answer when it is whole."""
        return answer_of(await self._call(self._stub.Complete, generate_request(prompt, options), timeout))

    def chat(
        self,
        conversation: Conversation,
        question: str,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncAnswerStream:
        """Ask the next question of a conversation, and stream the answer.

        Both are added to the conversation once the answer has come to its end; before, it stays as it was.
        """
        request = generate_request(conversation.asking(question), options)
        return self._answer(request, timeout, lambda answer: conversation.add(question, answer))

    async def tokenize(self, prompt: Prompt, *, timeout: float | None = None) -> list[int]:
        """Give the token ids that a generation from this text or these messages would begin with."""
        return list((await self._call(self._stub.Tokenize, tokenize_request(prompt), timeout)).token_ids)

    async def stats(self, *, timeout: float | None = None) -> gateway_pb2.StatsResponse:
        """Tell what is served, and how pool and queue stand."""
        return await self._call(self._stub.Stats, gateway_pb2.StatsRequest(), timeout)

    async def explain(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[LookupOptions]
    ) -> gateway_pb2.ExplainResponse:
        """Tell how much of a prompt is cached, and why the first token that is not, is not. Changes nothing."""
        return await self._call(self._stub.Explain, explain_request(prompt, options), timeout)

    def warm(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[WarmOptions]) -> AsyncWarmStream:
        """Compute a prompt into the cache without generating, and tell how far it is."""
        request, attempts = warm_request(prompt, options), self._terms.attempts(timeout)
        return AsyncWarmStream(
            lambda seconds: self._stub.Warm(request, timeout=seconds, metadata=self._terms.metadata),
            attempts,
            PartialWarm(),
        )

    async def pin(
        self, prompt: Prompt, ttl_seconds: float, *, timeout: float | None = None, **options: Unpack[LookupOptions]
    ) -> gateway_pb2.PinResponse:
        """Keep what is cached of a prompt for some seconds, whatever else comes."""
        return await self._call(self._stub.Pin, pin_request(prompt, ttl_seconds, options), timeout)

    async def unpin(self, pin_id: str, *, timeout: float | None = None) -> None:
        """End a pin before its time."""
        await self._call(self._stub.Unpin, gateway_pb2.UnpinRequest(pin_id=pin_id), timeout)

    async def list_pins(self, *, timeout: float | None = None) -> Sequence[gateway_pb2.PinnedPrefix]:
        """List the tenant's pins, soonest to end first."""
        return (await self._call(self._stub.ListPins, gateway_pb2.ListPinsRequest(), timeout)).pins

    async def flush(self, *, salt: str | None = None, timeout: float | None = None) -> gateway_pb2.FlushResponse:
        """Forget what is cached for the tenant, or for one of its salts."""
        return await self._call(self._stub.Flush, gateway_pb2.FlushRequest(salt=salt), timeout)

    def _answer(
        self,
        request: gateway_pb2.GenerateRequest,
        timeout: float | None,
        on_end: Callable[[str], None] | None = None,
    ) -> AsyncAnswerStream:
        return AsyncAnswerStream(
            lambda seconds: self._stub.Generate(request, timeout=seconds, metadata=self._terms.metadata),
            self._terms.attempts(timeout),
            on_end,
        )

    async def _call(
        self, method: "grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]", request: RequestT, timeout: float | None
    ) -> ResponseT:
        attempts = self._terms.attempts(timeout)
        while True:
            try:
                return await method(request, timeout=attempts.remaining(), metadata=self._terms.metadata)
            except grpc.aio.AioRpcError as error:
                failure = error_of(error)
                if (wait := attempts.wait_after(failure)) is None:
                    raise failure from error
                await asyncio.sleep(wait)
            except asyncio.CancelledError:
                # gRPC says this too where the client was closed, and not the task that waits.
                if is_task_cancelled():
                    raise
                raise make_error(grpc.StatusCode.CANCELLED, "the client was closed") from None
