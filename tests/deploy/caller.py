"""A client of a deployment, with the API key that `deploy/secrets.sh` made."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, generation_pb2
from tests.integration.waiting import HANG_SECONDS

Answer: TypeAlias = Any
"""A call and the iterator over its messages in one; gRPC's types know no name for it that can be used."""


class Caller:
    """A client with the API key that the script made."""

    def __init__(self, port: int, secrets: Path) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
        self._metadata = (("authorization", f"Bearer {(secrets / 'api.key').read_text()}"),)

    def stream(self, tokens: int) -> Answer:
        sampling = generation_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = gateway_pb2.GenerateRequest(prompt="a prompt of several tokens", sampling=sampling)
        stub = gateway_pb2_grpc.GatewayStub(self._channel)
        return stub.Generate(request, metadata=self._metadata, timeout=HANG_SECONDS)

    def is_served(self) -> bool:
        """Whether the gateway has a worker."""
        request = health_pb2.HealthCheckRequest(service="readiness")
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        answer = stub.Check(request, timeout=HANG_SECONDS)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        self._channel.close()


def tokens_of(messages: Iterable[gateway_pb2.GenerateResponse]) -> int:
    return sum(len(delta.token_ids) for message in messages for delta in message.deltas)
