"""One client's streams, read message by message."""

import contextlib
from collections.abc import Iterator

import grpc
from grpc import StatusCode

from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, generation_pb2
from tests.integration.sidecar import credential
from tests.integration.waiting import HANG_SECONDS


def prompt(text: str, max_tokens: int, *, n: int = 1, salt: str = "") -> gateway_pb2.GenerateRequest:
    """Make a greedy request whose outputs end by their length."""
    cache = generation_pb2.CacheControl(salt=salt)
    sampling = generation_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return gateway_pb2.GenerateRequest(prompt=text, n=n, sampling=sampling, cache=cache)


class Stream:
    """A live call, whose first message has come if it was waited for."""

    def __init__(
        self,
        channel: grpc.Channel,
        request: gateway_pb2.GenerateRequest,
        tenant: str = "acme",
        *,
        timeout: float = HANG_SECONDS,
    ) -> None:
        self.request = request
        self.tenant = tenant
        self.messages: list[gateway_pb2.GenerateResponse] = []
        self._call = gateway_pb2_grpc.GatewayStub(channel).Generate(
            request, metadata=credential(tenant), timeout=timeout
        )

    def wait_for_tokens(self) -> "Stream":
        """Read the first message."""
        self.messages.append(next(self._call))
        return self

    def rest(self) -> StatusCode:
        """Read to the end, and return the status."""
        with contextlib.suppress(grpc.RpcError):
            self.messages += self._call
        return self._call.code()

    def cancel(self) -> None:
        self._call.cancel()

    def details(self) -> str:
        """Tell what the status says more, once the call has ended."""
        return self._call.details() or ""

    def token_ids(self, output: int = 0) -> list[int]:
        """All ids of an output that have come."""
        return [token_id for delta in self._deltas(output) for token_id in delta.token_ids]

    def text(self, output: int = 0) -> str:
        return "".join(delta.text for delta in self._deltas(output))

    @property
    def completion(self) -> gateway_pb2.Completion | None:
        """The terminal message, if it has come."""
        last = self.messages[-1] if self.messages else gateway_pb2.GenerateResponse()
        return last.completion if last.HasField("completion") else None

    def _deltas(self, output: int) -> Iterator[gateway_pb2.OutputDelta]:
        return (delta for message in self.messages for delta in message.deltas if delta.index == output)
