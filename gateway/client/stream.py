"""The streams of the synchronous client."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import grpc

from prefixgate.gateway.client.answer import Answer, Delta, PartialAnswer, Usage
from prefixgate.gateway.client.attempts import Attempts
from prefixgate.gateway.client.errors import error_of
from prefixgate.gateway.client.parts import Parts
from prefixgate.proto import gateway_pb2

MessageT = TypeVar("MessageT")
MessageT_co = TypeVar("MessageT_co", covariant=True)
ItemT = TypeVar("ItemT")
WholeT = TypeVar("WholeT")


class RunningCall(Protocol[MessageT_co]):
    """What gRPC gives for a call that streams its answer."""

    def __next__(self) -> MessageT_co: ...

    def cancel(self) -> bool:
        """Cancel it; does nothing to a call that has ended."""
        ...


class Stream(Iterator[ItemT], Generic[MessageT, ItemT, WholeT]):
    """A call that answers piece by piece; iterate over it, or ask for the ``result``.

    The call has begun. It is made anew, as the client's policy says, as long as nothing of it has come. Closing the
    stream cancels the call on the server, as does leaving its ``with`` block, an error, or dropping it.
    """

    def __init__(
        self,
        start: Callable[[float | None], RunningCall[MessageT]],
        attempts: Attempts,
        parts: Parts[MessageT, ItemT, WholeT],
    ) -> None:
        """``start`` makes the call, with a timeout."""
        self._start = start
        self._attempts = attempts
        self._parts = parts
        self._items: deque[ItemT] = deque()
        self._closed = threading.Event()
        self._call = start(attempts.remaining())

    def __next__(self) -> ItemT:
        """Wait for the next piece. Raises GatewayError."""
        try:
            while not self._items:
                try:
                    message = next(self._call)
                except grpc.RpcError as error:
                    self._try_again(error)
                else:
                    self._items += self._parts.add(message)
        except StopIteration:
            self._end()
            raise
        except BaseException:  # Ctrl-C comes in here too
            self.close()
            raise
        return self._items.popleft()

    def result(self) -> WholeT:
        """Read what is left, and give the whole."""
        for _ in self:
            pass
        return self._parts.whole()

    def close(self) -> None:
        """Cancel the call, unless it has ended."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self) -> None:
        self._parts.whole()

    def _try_again(self, error: grpc.RpcError) -> None:
        failure = error_of(error)
        wait = None if self._parts.begun else self._attempts.wait_after(failure)
        if wait is None or self._closed.wait(wait):
            raise failure from error
        self._call = self._start(self._attempts.remaining())
        if self._closed.is_set():  # by another thread, just now
            self._call.cancel()


class AnswerStream(Stream[gateway_pb2.GenerateResponse, Delta, Answer]):
    """The deltas of an answer."""

    def __init__(
        self,
        start: Callable[[float | None], RunningCall[gateway_pb2.GenerateResponse]],
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


class WarmStream(Stream[gateway_pb2.WarmResponse, gateway_pb2.WarmProgress, gateway_pb2.Completion]):
    """How far a prompt is computed; the result carries what it cost."""
