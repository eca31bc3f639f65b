"""Cache control through real processes. Paired throughout: who shares finds it, and who does not finds nothing, as if
nobody else had ever called.
"""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from prefixgate.proto import gateway_pb2, generation_pb2
from tests.integration.sidecar import Sidecar
from tests.integration.tenant import MAX_TOKENS, PROMPT_TOKENS, Tenant, new_prompt
from tests.integration.waiting import until

WHOLE_BLOCKS = 96
NOBODYS_PIN = f"{7:016x}"


class Measured(Tenant):
    """One whose calls' real cost is read from the worker."""

    def __init__(self, sidecar: Sidecar, channel: grpc.Channel, name: str) -> None:
        super().__init__(channel, name)
        self._sidecar = sidecar

    def computed_by(self, method: str, prompt: str, **cache: Any) -> int:
        """Tell how many tokens the worker really computes for a call."""
        before = self._computed()
        {"Generate": self.generate, "Warm": self.warm}[method](prompt, **cache)
        return int(self._computed() - before)

    def _computed(self) -> float:
        return self._sidecar.until_idle()[1].total("prefixgate_worker_computed_tokens_total")


Trio = tuple[Measured, Measured, Measured]


@pytest.fixture
def trio(sidecar: Sidecar) -> Iterator[Trio]:
    """Acme, bolt and crux, who find nothing cached, and leave nothing."""
    with sidecar.channel() as channel:
        acme, bolt, crux = (Measured(sidecar, channel, name) for name in ("acme", "bolt", "crux"))
        tenants = acme, bolt, crux
        for tenant in tenants:
            tenant.flush()
        yield tenants
        for tenant in tenants:
            tenant.flush()


NEVER_SEEN = (0, gateway_pb2.MISS_REASON_NEVER_SEEN)


def seen(answer: gateway_pb2.ExplainResponse) -> tuple[int, int]:
    return answer.cached_tokens, answer.miss_reason


class TestExplain:
    def test_before_and_after_for_one_tenant_and_never_for_the_others(self, trio: Trio) -> None:
        acme, bolt, _ = trio
        prompt = new_prompt()
        cold = acme.explain(prompt)
        assert seen(cold) == NEVER_SEEN
        assert cold.prompt_tokens == PROMPT_TOKENS
        acme.generate(prompt)
        warm = acme.explain(prompt)
        assert seen(warm) == (PROMPT_TOKENS - 1, gateway_pb2.MISS_REASON_NONE)
        assert warm.block_hit_tokens == WHOLE_BLOCKS
        assert warm.partial_copy_tokens + warm.claimed_tail_tokens == PROMPT_TOKENS - 1 - WHOLE_BLOCKS
        assert acme.generate(prompt).cached_tokens == warm.cached_tokens
        # To the letter what a tenant is told that asks before anybody called.
        assert bolt.explain(prompt) == cold
        assert acme.explain(prompt, "salt") == cold
        assert bolt.computed_by("Generate", prompt) == PROMPT_TOKENS + MAX_TOKENS - 1

    def test_where_and_how_a_prompt_diverges(self, trio: Trio) -> None:
        acme, bolt, _ = trio
        prompt = new_prompt(64)
        acme.generate(prompt)
        other = prompt[:40] + "z" * 30
        found = acme.explain(other)
        assert seen(found) == (40, gateway_pb2.MISS_REASON_DIVERGED)
        assert (found.block_hit_tokens, found.diverged_at, found.continuation_tokens) == (32, 8, 8)
        assert acme.generate(other).cached_tokens == 40
        assert seen(bolt.explain(other)) == NEVER_SEEN

    def test_what_was_evicted_is_told_to_its_tenant_alone(self, trio: Trio) -> None:
        acme, bolt, _ = trio
        prompt = new_prompt()
        acme.generate(prompt)
        bolt.flood()
        assert seen(acme.explain(prompt)) == (0, gateway_pb2.MISS_REASON_EVICTED)
        assert seen(bolt.explain(prompt)) == NEVER_SEEN
        assert seen(acme.explain(prompt, "salt")) == NEVER_SEEN

    def test_it_changes_nothing(self, trio: Trio) -> None:
        acme, _, _ = trio
        prompt = new_prompt()
        before = acme.stats()
        for _ in range(3):
            acme.explain(prompt)
        assert acme.stats() == before


class TestWarm:
    def test_tells_how_far_it_is_and_what_it_cost(self, trio: Trio) -> None:
        acme, _, _ = trio
        messages = acme.warm(new_prompt(900))
        steps = [message.progress for message in messages[:-1]]
        assert steps
        computed = [step.computed_tokens for step in steps]
        assert computed == sorted(computed)
        assert (steps[-1].prompt_tokens, steps[-1].cached_tokens, steps[-1].computed_tokens) == (900, 0, 900)
        usage = messages[-1].completion.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (900, 0, 0)

    def test_serves_the_tenant_that_warmed_and_no_other(self, trio: Trio) -> None:
        acme, bolt, crux = trio
        prompt = new_prompt()
        assert acme.computed_by("Warm", prompt) == PROMPT_TOKENS
        assert acme.generate(prompt).cached_tokens == PROMPT_TOKENS - 1
        assert acme.computed_by("Warm", prompt) == 1
        assert acme.computed_by("Warm", prompt, salt="salt") == PROMPT_TOKENS
        assert bolt.computed_by("Warm", prompt) == PROMPT_TOKENS
        assert crux.computed_by("Generate", prompt) == PROMPT_TOKENS + MAX_TOKENS - 1

    def test_what_keeps_nothing_is_refused(self, trio: Trio) -> None:
        acme, _, _ = trio
        request = gateway_pb2.WarmRequest(
            prompt="x", cache=generation_pb2.CacheControl(mode=generation_pb2.CACHE_MODE_READ_ONLY)
        )
        code, details = acme.refusal("Warm", request)
        assert (code, details.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "cache.mode")


class TestPins:
    def test_a_pinned_prefix_survives_a_flood_and_expires(self, trio: Trio) -> None:
        acme, bolt, _ = trio
        kept, passing = new_prompt(), new_prompt()
        acme.generate(kept)
        pin = acme.pin(kept)
        assert pin.pinned_tokens == WHOLE_BLOCKS
        assert 0 < pin.expires_in_seconds <= 600
        bolt.flood()
        assert acme.generate(kept).cached_tokens >= WHOLE_BLOCKS
        acme.unpin(pin.pin_id)
        assert acme.pin_ids() == []
        bolt.flood()
        assert acme.generate(kept).cached_tokens == 0
        acme.generate(passing, ttl_seconds=0.2)
        until(lambda: not acme.pin_ids(), "a pin ends when its time has come")
        bolt.flood()
        assert acme.generate(passing).cached_tokens == 0

    def test_another_tenants_pin_is_not_there(self, trio: Trio) -> None:
        acme, bolt, _ = trio
        prompt = new_prompt()
        nothing = bolt.stats()
        acme.generate(prompt)
        # As one finds it who pins what nobody ever cached.
        never_seen = bolt.refusal("Pin", gateway_pb2.PinRequest(prompt=new_prompt(), ttl_seconds=60.0))
        assert never_seen[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert bolt.refusal("Pin", gateway_pb2.PinRequest(prompt=prompt, ttl_seconds=60.0)) == never_seen
        salted = gateway_pb2.PinRequest(prompt=prompt, ttl_seconds=60.0, salt="salt")
        assert acme.refusal("Pin", salted) == never_seen
        pin_id = acme.pin(prompt).pin_id
        assert bolt.pin_ids() == []
        unknown = bolt.refusal("Unpin", gateway_pb2.UnpinRequest(pin_id=NOBODYS_PIN))
        assert unknown[0] is grpc.StatusCode.NOT_FOUND
        assert bolt.refusal("Unpin", gateway_pb2.UnpinRequest(pin_id=pin_id)) == unknown
        assert acme.pin_ids() == [pin_id]
        assert bolt.stats() == nothing
        assert (acme.stats().pins, acme.stats().pinned_blocks) == (1, WHOLE_BLOCKS // 16)

    def test_the_limit_is_told_with_its_numbers(self, trio: Trio) -> None:
        acme, _, _ = trio
        prompt = new_prompt(200)
        acme.generate(prompt)
        code, details = acme.refusal("Pin", gateway_pb2.PinRequest(prompt=prompt, ttl_seconds=60.0))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "12 cached blocks of 16 tokens" in details
        assert "of this worker's 64 blocks all pins together may hold 6" in details
        # Nor can a call have it that asks by the way; its answer is not hurt.
        assert acme.generate(prompt, ttl_seconds=60.0).pinned_tokens == 0

    @pytest.mark.parametrize("seconds", [0.0, -1.0, 86_401.0, float("nan"), float("inf")])
    def test_a_time_out_of_bounds_is_refused_by_name(self, trio: Trio, seconds: float) -> None:
        acme, _, _ = trio
        code, details = acme.refusal("Pin", gateway_pb2.PinRequest(prompt="x", ttl_seconds=seconds))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(f"ttl_seconds: {seconds} is out of range; must be in (0, 86400]")


class TestFlush:
    def test_makes_the_next_call_cold_for_its_tenant_and_salt_only(self, trio: Trio) -> None:
        acme, bolt, _ = trio
        prompt = new_prompt()
        for tenant, salt in ((acme, ""), (acme, "salt"), (bolt, "")):
            tenant.generate(prompt, salt=salt)
        assert acme.flush(salt="salt").freed_blocks > 0
        assert acme.explain(prompt).cached_tokens == PROMPT_TOKENS - 1
        assert acme.computed_by("Generate", prompt, salt="salt") == PROMPT_TOKENS + MAX_TOKENS - 1
        acme.flush()
        assert acme.computed_by("Generate", prompt) == PROMPT_TOKENS + MAX_TOKENS - 1
        assert acme.computed_by("Generate", prompt, salt="salt") == PROMPT_TOKENS + MAX_TOKENS - 1
        assert bolt.generate(prompt).cached_tokens == PROMPT_TOKENS - 1

    def test_of_one_tenant_leaves_anothers_pins(self, trio: Trio) -> None:
        acme, bolt, _ = trio
        prompt = new_prompt(40)
        for tenant in (acme, bolt):
            tenant.generate(prompt)
            tenant.pin(prompt)
        done = acme.flush()
        assert done.ended_pins == 1
        assert (acme.stats().pins, bolt.stats().pins) == (0, 1)
        assert acme.flush() == gateway_pb2.FlushResponse()


def test_stats_tell_a_tenant_of_itself_alone(trio: Trio) -> None:
    acme, bolt, _ = trio
    bolts = bolt.stats()
    before = acme.stats()
    prompt = new_prompt()
    acme.generate(prompt)
    acme.generate(prompt)
    after = acme.stats()
    assert after.queried_tokens - before.queried_tokens == 2 * PROMPT_TOKENS
    assert after.hit_tokens - before.hit_tokens == PROMPT_TOKENS - 1
    assert after.cached_blocks > before.cached_blocks
    assert bolt.stats() == bolts


def test_to_tokenize_neither_finds_nor_leaves_anything(trio: Trio) -> None:
    acme, bolt, _ = trio
    prompt = new_prompt()
    acme.generate(prompt)
    before = acme.stats(), bolt.stats()
    request = gateway_pb2.TokenizeRequest(prompt=prompt)
    answer = acme.do("Tokenize", request)
    assert len(answer.token_ids) == PROMPT_TOKENS
    assert bolt.do("Tokenize", request) == answer
    assert (acme.stats(), bolt.stats()) == before
    assert seen(bolt.explain(prompt)) == NEVER_SEEN


def test_no_method_is_without_its_pair_of_tests() -> None:
    """Whoever adds one adds a test here, or in test_isolation.py, that no other tenant sees through it."""
    methods = {method.name for method in gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods}
    assert methods == {
        *("Generate", "Complete"),  # test_isolation.py
        *("Explain", "Warm", "Pin", "Unpin", "ListPins", "Flush", "Stats", "Tokenize"),
    }
