"""The streams of the asynchronous client."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc
import grpc.aio

from prefixgate.gateway.client.answer import Answer, Delta, PartialAnswer, Usage
from prefixgate.gateway.client.attempts import Attempts
from prefixgate.gateway.client.errors import error_of, make_error
from prefixgate.gateway.client.parts import Parts
from prefixgate.proto import gateway_pb2

MessageT = TypeVar("MessageT")
ItemT = TypeVar("ItemT")
WholeT = TypeVar("WholeT")


class AsyncStream(AsyncIterator[ItemT], Generic[MessageT, ItemT, WholeT]):
    """A call that answers piece by piece; iterate over it, or await the ``result``.

    The call has begun. It is made anew, as the client's policy says, as long as nothing of it has come. Closing the
    stream cancels the call on the server, as does leaving its ``async with`` block, an error, the end of the task that
    reads it, or dropping it.
    """

    def __init__(
        self,
        start: "Callable[[float | None], grpc.aio.UnaryStreamCall[Any, MessageT]]",
        attempts: Attempts,
        parts: Parts[MessageT, ItemT, WholeT],
    ) -> None:
        """``start`` makes the call, with a timeout."""
        self._start = start
        self._attempts = attempts
        self._parts = parts
        self._items: deque[ItemT] = deque()
        self._closed = asyncio.Event()
        self._call = start(attempts.remaining())

    async def __anext__(self) -> ItemT:
        """Wait for the next piece. Raises GatewayError."""
        try:
            while not self._items:
                if (message := await self._read()) is None:
                    self._end()
                    raise StopAsyncIteration
                self._items += self._parts.add(message)
        except StopAsyncIteration:
            raise
        except BaseException:
            await self.aclose()
            raise
        return self._items.popleft()

    async def result(self) -> WholeT:
        """Read what is left, and give the whole."""
        async for _ in self:
            pass
        return self._parts.whole()

    async def aclose(self) -> None:
        """Cancel the call, unless it has ended."""
        self._closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # gRPC's own call would do so too, but not before the garbage collector finds it in a cycle of its own.
        if hasattr(self, "_call") and not self._call.done():
            self._call.cancel()

    def _end(self) -> None:
        self._parts.whole()

    async def _read(self) -> MessageT | None:
        """Read the next message, beginning anew while that is right; None at the end."""
        while True:
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as error:
                failure = error_of(error)
                wait = None if self._parts.begun else self._attempts.wait_after(failure)
                if wait is None or await self._closes_within(wait):
                    raise failure from error
                self._call = self._start(self._attempts.remaining())
            except asyncio.CancelledError:
                # gRPC says this too where the call was cancelled, and not the task that reads it.
                if is_task_cancelled():
                    raise
                raise make_error(grpc.StatusCode.CANCELLED, "the stream or its client was closed") from None
            else:
                return None if message is grpc.aio.EOF else message  # type: ignore[return-value]

    async def _closes_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._closed.wait()
        except TimeoutError:
            return False


def is_task_cancelled() -> bool:
    """Tell, in an ``except CancelledError``, whether the running task itself is to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncAnswerStream(AsyncStream[gateway_pb2.GenerateResponse, Delta, Answer]):
    """The deltas of an answer."""

    def __init__(
        self,
        start: "Callable[[float | None], grpc.aio.UnaryStreamCall[Any, gateway_pb2.GenerateResponse]]",
        attempts: Attempts,
        on_end: Callable[[str], None] | None = None,
    ) -> None:
        """``on_end`` is called once with the text of the first output when the answer has ended well."""
        super().__init__(start, attempts, parts := PartialAnswer())
        self._answer = parts
        self._on_end = on_end

    @property
    def text(self) -> str:
        """The text of the first output, as far as it has come."""
        return self._answer.text

    @property
    def usage(self) -> Usage:
        """What the call cost. Raises BrokenStreamError where the answer has not come to its end."""
        return self._answer.whole().usage

    def _end(self) -> None:
        text = self._answer.whole().text
        if self._on_end is not None:
            self._on_end(text)
            self._on_end = None


class AsyncWarmStream(AsyncStream[gateway_pb2.WarmResponse, gateway_pb2.WarmProgress, gateway_pb2.Completion]):
    """How far a prompt is computed; the result carries what it cost."""
