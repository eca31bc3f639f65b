"""Tenants and salts: who shares computes less, and who does not computes as if nobody else had ever called."""

import string
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, generation_pb2
from prefixgate.worker.witness_options import WitnessOptions
from tests.integration.oracle import Oracle
from tests.integration.sidecar import Sidecar, credential, gateway_stub
from tests.integration.waiting import HANG_SECONDS

PROMPT_TOKENS, MAX_TOKENS = 100, 8
FULL_BLOCKS = PROMPT_TOKENS // 16 * 16


class Cost(NamedTuple):
    """What a call got from the cache, and what the worker really computed for it."""

    cached: int
    computed: int


class Asker:
    """Asks one prompt, by one method, for any tenant and salt."""

    def __init__(self, sidecar: Sidecar, method: str, prompt: str) -> None:
        self._sidecar = sidecar
        self._method = method
        self._prompt = prompt
        self._oracle = Oracle(WitnessOptions(), longest=PROMPT_TOKENS + MAX_TOKENS)

    def ask(self, tenant: str, salt: str = "") -> Cost:
        """Make a call and tell its cost; its answer is that of a witness that never saw another call."""
        request = gateway_pb2.GenerateRequest(
            prompt=self._prompt,
            sampling=generation_pb2.SamplingParams(max_tokens=MAX_TOKENS),
            cache=generation_pb2.CacheControl(salt=salt),
        )
        before = self._computed()
        with self._sidecar.channel() as channel:
            token_ids, usage = METHODS[self._method](gateway_stub(channel), request, tenant)
        expected = self._oracle.output(request, tenant, 0)
        assert expected is not None
        assert token_ids == expected.token_ids
        assert usage.prompt_tokens == PROMPT_TOKENS
        return Cost(usage.cached_tokens, int(self._computed() - before))

    def _computed(self) -> float:
        return self._sidecar.until_idle()[1].total("prefixgate_worker_computed_tokens_total")


Answer = tuple[list[int], generation_pb2.Usage]


def by_generate(stub: "gateway_pb2_grpc.GatewayStub", request: gateway_pb2.GenerateRequest, tenant: str) -> Answer:
    messages = list(stub.Generate(request, metadata=credential(tenant), timeout=HANG_SECONDS))
    token_ids = [token_id for message in messages for delta in message.deltas for token_id in delta.token_ids]
    return token_ids, messages[-1].completion.usage


def by_complete(stub: "gateway_pb2_grpc.GatewayStub", request: gateway_pb2.GenerateRequest, tenant: str) -> Answer:
    answer = stub.Complete(request, metadata=credential(tenant), timeout=HANG_SECONDS)
    return list(answer.outputs[0].token_ids), answer.completion.usage


METHODS: dict[str, Callable[["gateway_pb2_grpc.GatewayStub", gateway_pb2.GenerateRequest, str], Answer]] = {
    "Generate": by_generate,
    "Complete": by_complete,
}

COLD = Cost(0, PROMPT_TOKENS + MAX_TOKENS - 1)


@pytest.fixture(scope="module")
def letters() -> Iterator[str]:
    """What prompts begin with, so that no two of them share as much as a token."""
    return iter(string.ascii_letters)


@pytest.fixture(params=list(METHODS))
def asker(request: pytest.FixtureRequest, sidecar: Sidecar, letters: Iterator[str]) -> Asker:
    # Where the pool is full of what other tests left, what is found again depends on what had to go.
    with sidecar.channel() as channel:
        for tenant in ("acme", "bolt", "crux"):
            gateway_stub(channel).Flush(gateway_pb2.FlushRequest(), metadata=credential(tenant), timeout=HANG_SECONDS)
    return Asker(sidecar, request.param, next(letters) + "x" * (PROMPT_TOKENS - 1))


def test_a_tenant_hits_what_it_has_cached_and_no_other_tenant_does(asker: Asker) -> None:
    assert asker.ask("acme") == COLD
    warm = asker.ask("acme")
    assert warm.cached >= FULL_BLOCKS
    assert warm.computed == COLD.computed - warm.cached
    assert asker.ask("bolt") == COLD
    assert asker.ask("acme") == warm
    assert asker.ask("bolt") == warm
    assert asker.ask("crux") == COLD


def test_a_salt_narrows_what_a_tenant_shares_and_opens_no_other_tenants(asker: Asker) -> None:
    assert asker.ask("acme") == COLD
    assert asker.ask("acme", salt="pepper") == COLD
    assert asker.ask("acme", salt="pepper").cached >= FULL_BLOCKS
    assert asker.ask("acme", salt="peppe") == COLD
    assert asker.ask("acme").cached >= FULL_BLOCKS
    for salt in ("", "pepper", "acme", "acme/pepper"):
        assert asker.ask("bolt", salt=salt) == COLD


def test_what_a_tenant_is_told_of_the_cache_is_its_own(sidecar: Sidecar, asker: Asker) -> None:
    def told(tenant: str) -> tuple[int, int]:
        with sidecar.channel() as channel:
            stats = gateway_stub(channel).Stats(
                gateway_pb2.StatsRequest(), metadata=credential(tenant), timeout=HANG_SECONDS
            )
        return stats.tenant.queried_tokens, stats.tenant.hit_tokens

    before = {tenant: told(tenant) for tenant in ("acme", "bolt")}
    asker.ask("acme")
    warm = asker.ask("acme")
    queried, hit = before["acme"]
    assert told("acme") == (queried + 2 * PROMPT_TOKENS, hit + warm.cached)
    assert told("bolt") == before["bolt"]
