"""Running out of blocks: who gives way, who never does, and that nobody can tell afterwards."""

import random
from collections.abc import Callable

import pytest
from grpc import StatusCode

from prefixgate.cache.accounts import TenantShare
from prefixgate.cache.admission import CacheMode
from prefixgate.cache.hashing import CacheScope
from prefixgate.worker.request import RequestState, SamplingParams
from tests.worker.driver import MODEL, Call, Driver, solo, words

RANDOM = SamplingParams(60, temperature=1.0, seed=5)


def preemptions(calls: list[Call]) -> list[int]:
    return [call.request.preemptions for call in calls]


def live(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.end is None]


def test_the_pool_is_used_to_its_last_block_and_not_reserved() -> None:
    driver = Driver(num_blocks=12)
    calls = [driver.submit(words(20, seed), 140) for seed in range(4)]
    driver.step()
    assert [call.request.state for call in calls] == [RequestState.RUNNING] * 4, "each could need 10 of 12 blocks"
    most = 0
    while driver.step():
        most = max(most, driver.cache.stats().active_blocks)
    assert most == 12
    assert [call.outputs for call in calls] == [solo(words(20, seed), 140) for seed in range(4)]


@pytest.mark.parametrize("tenants", [1, 3])
def test_where_one_and_a_half_fit_of_eight_that_ask_all_finish_and_the_oldest_never_gives_way(
    tenants: int, scaled: Callable[[int], int]
) -> None:
    driver = Driver(num_blocks=15, max_running=8, max_batch_tokens=64)
    calls: list[Call] = []
    for _ in range(scaled(2000)):
        while len(live(calls)) < 8:
            tenant = f"t{len(calls) % tenants}"
            calls.append(driver.submit(words(40, len(calls) % 30), 100, tenant=tenant))  # ten blocks at its end
        oldest = live(calls)[0]
        before = oldest.request.preemptions
        driver.step()
        assert oldest.request.preemptions == before
    driver.run()
    assert [call.code for call in calls] == [StatusCode.OK] * len(calls)
    assert 0 < max(preemptions(calls)) <= 8
    for call in calls:
        assert call.outputs == solo(call.request.token_ids, 100, tenant=call.request.scope.tenant)
    driver.assert_idle()


def test_the_last_in_order_gives_way_and_comes_back_in_its_place() -> None:
    driver = Driver(num_blocks=11, max_running=3)
    calls = [driver.submit(words(30, seed), 40, priority=priority) for seed, priority in ((0, 0), (1, -5), (2, 3))]
    late = driver.submit(words(30, 3), 40, priority=-9)
    driver.run()
    assert preemptions([calls[2], calls[0]]) == [0, 0]
    assert calls[1].request.preemptions > 0
    assert late.request.preemptions == 0
    ended = [call.request for call in (*calls, late)]
    assert all(request.state is RequestState.ENDED for request in ended)
    assert [call.outputs[0] for call in calls] == [solo(words(30, seed), 40)[0] for seed in range(3)]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("prompt_tokens", [15, 16, 17, 33])
def test_a_seed_gives_the_same_tokens_across_preemptions(prompt_tokens: int, n: int) -> None:
    driver = Driver(num_blocks=20, max_running=9, max_batch_tokens=20)
    calls = [driver.submit(words(prompt_tokens, seed), n=n, sampling=RANDOM) for seed in range(9 // n)]
    driver.run()
    assert sum(preemptions(calls)) > 0
    for seed, call in enumerate(calls):
        assert call.outputs == solo(words(prompt_tokens, seed), n=n, sampling=RANDOM)
    driver.assert_idle()


def test_what_a_preempted_call_finds_of_itself_is_no_hit_and_its_first_token_comes_once() -> None:
    driver = Driver(num_blocks=15, max_running=8)
    calls = [driver.submit(words(40, seed), 100) for seed in range(8)]
    driver.run()
    counts = driver.observations
    assert counts.preemptions == sum(preemptions(calls)) > 0
    assert (counts.hit_tokens("acme"), counts.queried_tokens("acme")) == (0, 8 * 40)
    assert counts.resumed_tokens["cached"] > 0
    assert [call.usage.cached_tokens for call in calls] == [0] * 8
    assert counts.first_token_seconds.cumulative()[0][-1][1] == 8
    assert counts.queue_seconds.cumulative()[0][-1][1] == 8
    assert counts.generated_tokens["acme"] == sum(call.usage.completion_tokens for call in calls) == 800
    computed = counts.prompt_tokens["acme", "computed"] + counts.resumed_tokens["computed"]
    # A call that comes back computes its newest token as the last of its carried ones; alone it would do that too.
    assert driver.engine.report().computed_tokens <= computed + 8 * 99


def test_resuming_mostly_hits_what_was_computed_before() -> None:
    driver = Driver(num_blocks=20, max_running=2)
    elder, younger = driver.submit(words(100), 64), driver.submit(words(100, 1), 100)
    driver.run()
    assert preemptions([elder, younger]) == [0, 1]
    assert driver.observations.resumed_tokens["cached"] > driver.observations.resumed_tokens["computed"]


@pytest.mark.parametrize("mode", [CacheMode.READ_ONLY, CacheMode.BYPASS])
def test_calls_that_keep_nothing_are_computed_again(mode: CacheMode) -> None:
    driver = Driver(num_blocks=15, max_running=8)
    calls = [driver.submit(words(40, seed), 100, cache_mode=mode) for seed in range(4)]
    driver.run()
    assert sum(preemptions(calls)) > 0
    assert [call.outputs for call in calls] == [solo(words(40, seed), 100) for seed in range(4)]
    driver.assert_idle()


def preempted_call(driver: Driver) -> Call:
    """Make a call and preempt it."""
    driver.submit(words(100), 120)
    call = driver.submit(words(60, 1), 100, n=2, deadline_seconds=50.0)
    while not call.request.preemptions:
        driver.step()
    assert call.request.state is RequestState.WAITING
    assert all(sequence.table is None for sequence in call.request.sequences)
    return call


def test_a_preempted_call_can_be_cancelled() -> None:
    driver = Driver(num_blocks=18)
    call = preempted_call(driver)
    driver.engine.cancel(call.request)
    driver.step()
    assert call.code is StatusCode.CANCELLED
    driver.run()
    driver.assert_idle()


def test_a_preempted_call_can_run_out_of_time() -> None:
    driver = Driver(num_blocks=18)
    call = preempted_call(driver)
    driver.now += 50
    driver.step()
    assert call.code is StatusCode.DEADLINE_EXCEEDED
    driver.run()
    driver.assert_idle()


@pytest.mark.parametrize("output", [0, 1])
def test_an_output_of_a_preempted_call_can_be_stopped(output: int) -> None:
    driver = Driver(num_blocks=18)
    call = preempted_call(driver)
    heard = len(call.outputs[output])
    driver.engine.cancel(call.request, output)
    driver.run()
    expected = solo(words(60, 1), 100, n=2)
    assert call.outputs[1 - output] == expected[1 - output]
    assert call.outputs[output] == expected[output][:heard]
    driver.assert_idle()


class TestTenants:
    def test_a_tenant_below_its_part_takes_from_one_above_its_own(self) -> None:
        driver = Driver(num_blocks=24, max_running=12)
        flood = [driver.submit(words(40, seed), 100, tenant="acme") for seed in range(6)]
        for _ in range(20):
            driver.step()
        assert driver.cache.room("acme") < 3
        call = driver.submit(words(40, 9), 100, tenant="bolt")
        driver.step()
        assert call.request.state is RequestState.RUNNING
        driver.run()
        assert call.request.preemptions == 0
        assert flood[0].request.preemptions == 0
        assert call.outputs == solo(words(40, 9), 100, tenant="bolt")
        assert [one.outputs for one in flood] == [solo(words(40, seed), 100) for seed in range(6)]

    def test_a_floor_is_had_whatever_others_hold(self) -> None:
        driver = Driver(num_blocks=24, shares={"bolt": TenantShare(floor=10)})
        flood = [driver.submit(words(40, seed), 100, tenant="acme") for seed in range(4)]
        for _ in range(40):
            driver.step()
        call = driver.submit(words(100, 9), 60, tenant="bolt")
        driver.step()
        assert call.request.state is RequestState.RUNNING
        driver.run()
        assert call.request.preemptions == 0
        assert [one.code for one in flood] == [StatusCode.OK] * 4

    def test_the_first_call_gets_what_another_tenant_was_promised_beyond_its_floor(self) -> None:
        driver = Driver(num_blocks=10, shares={"bolt": TenantShare(floor=3)})
        first = driver.submit(words(64), 49, tenant="acme")  # all seven blocks that the floor leaves
        while first.request.usage.completion_tokens < 20:
            driver.step()
        other = driver.submit(words(33, 5), 40, tenant="bolt")  # three blocks, and one promised
        driver.run()
        assert (first.code, first.request.preemptions) == (StatusCode.OK, 0)
        assert first.outputs == solo(words(64), 49)
        assert (other.code, other.outputs) == (StatusCode.OK, solo(words(33, 5), 40, tenant="bolt"))

    def test_a_tenant_at_its_cap_takes_from_itself(self) -> None:
        driver = Driver(num_blocks=40, shares={"acme": TenantShare(cap=12)})
        capped = [driver.submit(words(40, seed), 100, tenant="acme") for seed in range(3)]
        other = driver.submit(words(40, 9), 100, tenant="bolt")
        driver.run()
        assert other.request.preemptions == 0
        assert sum(preemptions(capped)) > 0
        assert [call.outputs for call in capped] == [solo(words(40, seed), 100) for seed in range(3)]


def test_a_full_pool_with_a_cancel_in_every_step_hurts_no_survivor(scaled: Callable[[int], int]) -> None:
    driver, draw = Driver(num_blocks=20, max_running=6, max_batch_tokens=24), random.Random(1)
    calls: list[Call] = []
    for number in range(scaled(2000)):
        while len(live(calls)) < 6:
            tenant = draw.choice(["acme", "bolt"])
            calls.append(driver.submit(words(draw.randrange(1, 60), draw.randrange(30)), 80, tenant=tenant))
        if number % 3:
            driver.engine.cancel(draw.choice(live(calls)).request)
        driver.step()
    driver.run()
    assert sum(preemptions(calls)) > 0
    for call in calls:
        for heard in call.outputs.values():
            assert heard == solo(call.request.token_ids, len(heard), tenant=call.request.scope.tenant)[0]
    driver.assert_idle()


def test_a_call_whose_tenants_pins_leave_it_too_little_ends_with_all_its_outputs() -> None:
    driver = Driver(num_blocks=40, shares={"acme": TenantShare(cap=8)}, pin_limit=8)
    driver.ask(words(64), 1)
    pin = driver.cache.pin(CacheScope("acme", MODEL), words(64), expires_at=1e9)
    sampling = SamplingParams(40, temperature=1.0, seed=1)
    call, other = (driver.submit(words(8, 7), n=2, sampling=sampling, tenant=tenant) for tenant in ("acme", "bolt"))
    driver.run()
    assert call.code is StatusCode.RESOURCE_EXHAUSTED
    assert [len(call.outputs[index]) for index in range(2)] == [25, 25], "up to the last slot of four blocks"
    assert other.outputs == solo(words(8, 7), n=2, sampling=sampling, tenant="bolt")
    driver.cache.unpin("acme", pin.pin_id)
    assert driver.ask(words(8, 7), n=2, sampling=sampling).code is StatusCode.OK
    driver.assert_idle()


def test_nobody_gives_way_where_pins_hold_what_is_lacking() -> None:
    """What is pinned does not come free however many calls give way, so none does in vain."""
    driver = Driver(num_blocks=40, pin_limit=20)
    assert driver.ask(words(256), 1, pin_seconds=1e9).usage.pinned_tokens == 256
    first, small = driver.submit(words(240, 1), 16), driver.submit(words(8, 2), 16)
    driver.step()
    # Within its part of ten blocks; there is room for fewer, and the small call holds too few to make it up.
    asker = driver.submit(words(159, 3), 1, tenant="bolt")
    assert driver.cache.room("bolt") < 10
    driver.run()
    assert [call.request.preemptions for call in (first, small, asker)] == [0, 0, 0]
    assert [call.code for call in (first, small, asker)] == [StatusCode.OK] * 3
