"""What the messages of a stream add up to."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from prefixgate.gateway.client.answer import broken_stream
from prefixgate.proto import gateway_pb2

MessageT_contra = TypeVar("MessageT_contra", contravariant=True)
ItemT_co = TypeVar("ItemT_co", covariant=True)
WholeT_co = TypeVar("WholeT_co", covariant=True)


class Parts(Protocol[MessageT_contra, ItemT_co, WholeT_co]):
    """Collects a stream. Knows nothing of calls, so that both clients share it."""

    @property
    def begun(self) -> bool:
        """Whether anything has come; such a call is not made again."""
        ...

    def add(self, message: MessageT_contra) -> Sequence[ItemT_co]:
        """Take a message, and give the pieces that it brought."""
        ...

    def whole(self) -> WholeT_co:
        """Give the whole. Raises BrokenStreamError where its end has not come."""
        ...


class PartialWarm:
    """The progress of a Warm, and its end."""

    def __init__(self) -> None:
        self.begun = False
        self._completion: gateway_pb2.Completion | None = None

    def add(self, message: gateway_pb2.WarmResponse) -> Sequence[gateway_pb2.WarmProgress]:
        """Take one message of the stream."""
        self.begun = True
        if message.HasField("completion"):
            self._completion = message.completion
        return [message.progress] if message.HasField("progress") else []

    def whole(self) -> gateway_pb2.Completion:
        """Give the end of the call. Raises BrokenStreamError where it has not come."""
        if self._completion is None:
            raise broken_stream()
        return self._completion
