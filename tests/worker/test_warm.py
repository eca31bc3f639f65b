"""Calls that compute their prompt and sample nothing."""

import pytest
from grpc import StatusCode

from prefixgate.cache.accounts import TenantShare
from prefixgate.worker.request import RefusedError
from tests.worker.driver import Driver, solo, words


def test_a_prompt_is_computed_once_and_told_of_as_it_comes() -> None:
    driver = Driver(max_batch_tokens=32)
    warm = driver.warm(words(100))
    assert (warm.code, warm.outputs, warm.finished) == (StatusCode.OK, {}, {})
    assert warm.prefilled == [32, 64, 96, 100]
    usage = warm.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (100, 0, 0)
    call = driver.ask(words(100), 8)
    assert call.usage.cached_tokens == 99
    assert call.outputs == solo(words(100), 8)
    driver.assert_idle()


def test_what_is_cached_is_not_computed_again() -> None:
    driver = Driver()
    driver.ask(words(50))
    warm = driver.warm(words(100))
    assert (warm.usage.cached_tokens, warm.prefilled) == (50, [50])
    again = driver.warm(words(100))
    assert (again.usage.cached_tokens, again.prefilled) == (99, [1])


def test_it_needs_no_more_room_than_its_prompt() -> None:
    driver = Driver(num_blocks=4)
    assert driver.warm(words(64)).code is StatusCode.OK
    with pytest.raises(RefusedError):
        driver.warm(words(65))
    capped = Driver(shares={"acme": TenantShare(cap=4)})
    assert capped.warm(words(64)).code is StatusCode.OK
    with pytest.raises(RefusedError, match=r"^token_ids: 65 prompt tokens can need 5 blocks .* the tenant can have 4$"):
        capped.warm(words(65))


def test_it_takes_its_turn_and_is_charged_like_any_other_call() -> None:
    driver = Driver(max_batch_tokens=16, max_running=8)
    warm = driver.submit(words(160), 1, prefill_only=True)
    call = driver.submit(words(40, 1), 4, tenant="bolt")
    driver.run()
    # Both tenants get every other step while both have prompts: 40 tokens take bolt three turns.
    spans = [[count for _, count in rows] for rows in driver.runner.steps]
    assert sum(map(sum, spans)) == 160 + 40 + 3
    assert max(map(sum, spans)) <= 16
    assert (warm.code, call.code) == (StatusCode.OK, StatusCode.OK)
    assert len(warm.prefilled) >= 10


def test_cancelled_it_leaves_what_it_computed() -> None:
    driver = Driver(max_batch_tokens=32)
    warm = driver.submit(words(100), 1, prefill_only=True)
    driver.step()
    driver.step()
    driver.engine.cancel(warm.request)
    driver.run()
    assert (warm.code, warm.prefilled) == (StatusCode.CANCELLED, [32, 64])
    assert driver.ask(words(100), 1).usage.cached_tokens == 64
    driver.assert_idle()


def test_its_deadline_ends_it() -> None:
    driver = Driver(max_batch_tokens=32)
    warm = driver.submit(words(100), 1, prefill_only=True, deadline_seconds=5.0)
    driver.step()
    driver.now += 5.0
    driver.run()
    assert warm.code is StatusCode.DEADLINE_EXCEEDED
    driver.assert_idle()


def test_preempted_it_ends_and_its_progress_never_falls() -> None:
    driver = Driver(num_blocks=12, max_batch_tokens=16, max_running=4)
    call = driver.submit(words(32, 1), 120, priority=1)
    for _ in range(4):
        driver.step()
    warm = driver.submit(words(150), 1, prefill_only=True)
    driver.run()
    assert (call.code, warm.code) == (StatusCode.OK, StatusCode.OK)
    assert warm.prefilled == sorted(set(warm.prefilled))
    assert warm.usage.cached_tokens + warm.prefilled[-1] == 150
    assert call.outputs == solo(words(32, 1), 120)
    driver.assert_idle()


def test_equal_ones_cost_one_prefill() -> None:
    driver = Driver(max_batch_tokens=64)
    warms = [driver.submit(words(160), 1, prefill_only=True) for _ in range(4)]
    driver.run()
    assert sum(driver.runner.tokens_per_step) == 160 + 3
    assert [warm.usage.cached_tokens for warm in warms] == [0, 159, 159, 159]


def test_its_model_at_fault_keeps_nothing() -> None:
    driver = Driver()
    driver.runner.spoils = lambda row: True
    warm = driver.warm(words(40))
    assert warm.code is StatusCode.INTERNAL
    driver.runner.spoils = lambda row: False
    assert driver.ask(words(40), 1).usage.cached_tokens == 0


def test_it_can_be_pinned_by_the_way() -> None:
    driver = Driver(pin_limit=8)
    warm = driver.warm(words(100), pin_seconds=30.0)
    assert warm.usage.pinned_tokens == 96
    assert driver.cache.stats().pinned_blocks == 6


def test_no_output_of_it_is_counted() -> None:
    driver = Driver()
    driver.warm(words(40))
    counts = driver.observations
    assert (sum(counts.outputs_ended.values()), sum(counts.generated_tokens.values())) == (0, 0)
    assert counts.calls_ended["ok"] == 1
    assert counts.queried_tokens("acme") == 40
