"""A tenant at a gateway, who uses all of its methods."""

import itertools
import string
from typing import Any

import grpc
import pytest

from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, generation_pb2
from tests.integration.sidecar import credential, gateway_stub
from tests.integration.waiting import HANG_SECONDS

PROMPT_TOKENS, MAX_TOKENS = 100, 8

LETTERS = itertools.cycle(string.ascii_letters)
FLOOD = itertools.count()


def new_prompt(tokens: int = PROMPT_TOKENS) -> str:
    """Write a text that begins with another letter than those before it."""
    return next(LETTERS) + "," * (tokens - 1)


class Tenant:
    """A tenant at a gateway."""

    def __init__(self, channel: grpc.Channel, name: str) -> None:
        self._stub: gateway_pb2_grpc.GatewayStub = gateway_stub(channel)
        self.name = name

    def do(self, method: str, request: Any) -> Any:
        """Make a call of any method; of a stream the messages are returned."""
        answer = getattr(self._stub, method)(request, metadata=credential(self.name), timeout=HANG_SECONDS)
        return list(answer) if method in ("Generate", "Warm") else answer

    def refusal(self, method: str, request: Any) -> tuple[grpc.StatusCode, str]:
        """Make a call that must fail, and tell how it does."""
        with pytest.raises(grpc.RpcError) as refused:
            self.do(method, request)
        error: Any = refused.value  # also a grpc.Call, which the type hints hold to be impossible
        return error.code(), error.details()

    def generate(self, prompt: str, **cache: Any) -> generation_pb2.Usage:
        request = gateway_pb2.GenerateRequest(
            prompt=prompt,
            sampling=generation_pb2.SamplingParams(max_tokens=MAX_TOKENS),
            cache=generation_pb2.CacheControl(**cache),
        )
        usage: generation_pb2.Usage = self.do("Generate", request)[-1].completion.usage
        return usage

    def warm(self, prompt: str, **cache: Any) -> list[gateway_pb2.WarmResponse]:
        request = gateway_pb2.WarmRequest(prompt=prompt, cache=generation_pb2.CacheControl(**cache))
        messages: list[gateway_pb2.WarmResponse] = self.do("Warm", request)
        return messages

    def explain(self, prompt: str, salt: str = "") -> gateway_pb2.ExplainResponse:
        answer: gateway_pb2.ExplainResponse = self.do("Explain", gateway_pb2.ExplainRequest(prompt=prompt, salt=salt))
        return answer

    def pin(self, prompt: str, seconds: float = 600.0, salt: str = "") -> gateway_pb2.PinnedPrefix:
        request = gateway_pb2.PinRequest(prompt=prompt, ttl_seconds=seconds, salt=salt)
        pin: gateway_pb2.PinnedPrefix = self.do("Pin", request).pin
        return pin

    def unpin(self, pin_id: str) -> None:
        self.do("Unpin", gateway_pb2.UnpinRequest(pin_id=pin_id))

    def pin_ids(self) -> list[str]:
        return [pin.pin_id for pin in self.do("ListPins", gateway_pb2.ListPinsRequest()).pins]

    def flush(self, **salt: str) -> gateway_pb2.FlushResponse:
        answer: gateway_pb2.FlushResponse = self.do("Flush", gateway_pb2.FlushRequest(**salt))
        return answer

    def stats(self) -> gateway_pb2.TenantStats:
        stats: gateway_pb2.TenantStats = self.do("Stats", gateway_pb2.StatsRequest()).tenant
        return stats

    def flood(self) -> None:
        """Bring more prompts than the pool has room for, which have no token in common with any of ``new_prompt``."""
        for _ in range(12):
            self.generate(f"{next(FLOOD):06d}" + "1" * 494)
