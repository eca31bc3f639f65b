"""What a call tells whoever traces it. Nothing here needs OpenTelemetry: by default nobody traces anything."""

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import grpc
import grpc.aio

from prefixgate.gateway.candidate import Choice
from prefixgate.proto import worker_pb2

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

if TYPE_CHECKING:  # a call holds its trace
    from prefixgate.gateway.live_calls import Call


class AttemptTrace(Protocol):
    """One attempt of a call at a worker."""

    def end(self, outcome: str) -> None:
        """Note its end: empty where it went well, else why not, in one of a few words."""


class CallTrace(Protocol):
    """One call. No method raises."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty for a call that is not traced."""

    def encoded(self, seconds: float) -> None:
        """Note that its prompt was rendered and encoded, which took so long."""

    def attempt(self, submit: worker_pb2.Submit, choice: Choice) -> AttemptTrace:
        """Note that it is sent to a worker. Sets ``submit.traceparent``, by which the worker goes on with the trace."""

    def end(self, call: "Call", code: grpc.StatusCode) -> None:
        """Note its end. Not to be used after it."""


class Traces(Protocol):
    """Traces of calls."""

    def begin(self, method: str, context: Context) -> CallTrace:
        """Begin with a call, whose metadata may name a trace. Does not raise."""

    def close(self, seconds: float) -> None:
        """Send what is left, and give up after so long. Blocks."""


class Untraced:
    """A call, an attempt and all calls that nobody traces."""

    trace_id = ""

    def begin(self, method: str, context: Context) -> CallTrace:
        """Trace nothing."""
        return self

    def encoded(self, seconds: float) -> None:
        """Note nothing."""

    def attempt(self, submit: worker_pb2.Submit, choice: Choice) -> AttemptTrace:
        """Note nothing."""
        return _UNTRACED_ATTEMPT

    def end(self, call: "Call", code: grpc.StatusCode) -> None:
        """Note nothing."""

    def close(self, seconds: float) -> None:
        """Do nothing."""


class _UntracedAttempt:
    def end(self, outcome: str) -> None:
        pass


_UNTRACED_ATTEMPT = _UntracedAttempt()
UNTRACED = Untraced()
"""Holds nothing, so that one will do for all."""
