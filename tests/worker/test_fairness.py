"""Tenants share by work done; a flood of one delays another's call by no more than the bound that the docs state."""

import math
import random

import pytest

from prefixgate.cache.accounts import TenantShare
from prefixgate.worker.request import RequestState
from tests.worker.driver import Call, Driver, words


def steps_to_first_token(driver: Driver, call: Call) -> int:
    steps = 0
    while call.request.first_token_at is None:
        driver.engine.step()
        steps += 1
        assert steps < 1000
    return steps


def bound(driver: Driver, prompt_tokens: int, *, part: float, tenants: int) -> int:
    """The steps to a first token as docs/scheduling.md has them."""
    turns = math.ceil(prompt_tokens / driver.limits.prompt_tokens)
    return math.ceil(turns / part) + tenants


def is_short(driver: Driver, of: str) -> bool:
    """Whether a worker has given away all that it has."""
    if of == "blocks":
        return driver.cache.room("bolt") < 2
    if of == "sequences":
        return driver.engine.report().running_sequences == driver.limits.max_running
    return driver.runner.tokens_per_step[-1] == driver.limits.max_batch_tokens


def generated(driver: Driver, tenant: str) -> int:
    """Work done for a tenant."""
    return driver.observations.prompt_tokens[tenant, "computed"] + driver.observations.generated_tokens[tenant]


class TestFlood:
    """A thousand calls of one tenant, and one of another."""

    @pytest.mark.parametrize("prompt_tokens", [16, 300])
    @pytest.mark.parametrize("prompts", [10, 400], ids=lambda tokens: f"flood-of-{tokens}")
    @pytest.mark.parametrize("short_of", ["blocks", "sequences", "tokens"])
    def test_a_single_call_has_its_first_token_within_the_bound(
        self, short_of: str, prompts: int, prompt_tokens: int
    ) -> None:
        driver = Driver(
            num_blocks={"blocks": 54, "sequences": 1000, "tokens": 1000}[short_of],
            max_running={"blocks": 32, "sequences": 6, "tokens": 40}[short_of],
            max_batch_tokens=64,
            max_waiting=2000,
        )
        for number in range(1000):
            driver.submit(words(prompts, number % 90), 60)
        driver.engine.step()
        while not is_short(driver, short_of):
            driver.engine.step()
        assert driver.engine.report().waiting_calls > 900
        call = driver.submit(words(prompt_tokens, 5), 60, tenant="bolt")
        steps = steps_to_first_token(driver, call)
        assert steps <= bound(driver, prompt_tokens, part=1 / 2, tenants=2)
        # And it goes on without a break, a token in each step.
        for _ in range(59):
            driver.engine.step()
        assert call.end is not None
        assert call.request.preemptions == 0

    def test_the_bound_grows_with_the_tenants_that_flood(self) -> None:
        driver = Driver(num_blocks=90, max_running=20, max_batch_tokens=64)
        for number in range(300):
            driver.submit(words(100, number % 90), 60, tenant=f"t{number % 5}")
        for _ in range(30):
            driver.engine.step()
        call = driver.submit(words(100, 7), 60, tenant="bolt")
        assert steps_to_first_token(driver, call) <= bound(driver, 100, part=1 / 6, tenants=6)

    def test_a_larger_weight_makes_it_shorter(self) -> None:
        driver = Driver(num_blocks=90, max_running=20, max_batch_tokens=64, weights={"bolt": 9.0})
        for number in range(300):
            driver.submit(words(300, number % 90), 60)
        for _ in range(30):
            driver.engine.step()
        call = driver.submit(words(600, 7), 60, tenant="bolt")
        assert steps_to_first_token(driver, call) <= bound(driver, 600, part=0.9, tenants=2)

    def test_a_tenant_below_its_floor_is_let_in_at_once(self) -> None:
        driver = Driver(num_blocks=60, max_running=32, max_batch_tokens=64, shares={"bolt": TenantShare(floor=30)})
        for number in range(200):
            driver.submit(words(40, number % 90), 60)
        for _ in range(30):
            driver.engine.step()
        call = driver.submit(words(300, 7), 60, tenant="bolt")
        assert steps_to_first_token(driver, call) <= bound(driver, 300, part=1 / 2, tenants=2)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tenants_that_always_want_more_get_work_by_weight(weight: float) -> None:
    driver = Driver(num_blocks=120, max_running=16, max_batch_tokens=64, weights={"acme": weight}, max_waiting=5000)
    for number in range(600):
        for tenant in ("acme", "bolt"):
            driver.submit(words(20 + number * 7 % 90, number % 90), 1 + number % 5, tenant=tenant)
    for _ in range(150):
        driver.engine.step()
    ratio = generated(driver, "acme") / generated(driver, "bolt")
    assert ratio == pytest.approx(weight, rel=0.15)


def test_staying_away_saves_up_no_turns() -> None:
    driver = Driver(num_blocks=120, max_running=16, max_batch_tokens=64, max_waiting=5000)
    for number in range(300):
        driver.submit(words(60, number % 90), 2, tenant="acme")
    for _ in range(100):
        driver.engine.step()
    before = generated(driver, "acme")
    for number in range(300):
        driver.submit(words(60, number % 90), 2, tenant="bolt")
    for _ in range(100):
        driver.engine.step()
    assert generated(driver, "bolt") == pytest.approx(generated(driver, "acme") - before, rel=0.15)


def test_within_a_tenant_priority_comes_before_age() -> None:
    driver = Driver(max_running=1)
    running = driver.submit(words(20), 3)
    driver.step()
    calls = [
        driver.submit(words(20, seed), 2, priority=priority) for seed, priority in ((1, 0), (2, -1), (3, 5), (4, 5))
    ]
    order: list[int] = []
    while driver.step():
        order += [
            index for index, call in enumerate(calls) if call.request.first_token_at is not None and index not in order
        ]
    assert running.end is not None
    assert order == [2, 3, 0, 1]


def test_a_tenants_priorities_are_its_own_affair() -> None:
    driver = Driver(num_blocks=120, max_running=16, max_batch_tokens=64, max_waiting=5000)
    for number in range(300):
        driver.submit(words(60, number % 90), 2, tenant="acme", priority=100)
        driver.submit(words(60, number % 90), 2, tenant="bolt", priority=-100)
    for _ in range(100):
        driver.engine.step()
    assert generated(driver, "bolt") == pytest.approx(generated(driver, "acme"), rel=0.15)


@pytest.mark.parametrize("shift", [-100, 100])
def test_a_tenant_that_raises_all_its_priorities_changes_nothing(shift: int) -> None:
    def history(shifts: dict[str, int]) -> list[list[int]]:
        """Tokens and preemptions of each call after every step, while all want more than there is."""
        driver, draw = Driver(num_blocks=36, max_running=10, max_batch_tokens=64), random.Random(3)
        calls, seen = [], []
        for _ in range(150):
            if draw.random() < 0.4:
                tenant, priority = draw.choice(["acme", "acme", "bolt", "coda"]), draw.randrange(3)
                calls.append(
                    driver.submit(
                        words(draw.randrange(1, 100), draw.randrange(90)),
                        draw.randrange(1, 80),
                        tenant=tenant,
                        priority=priority + shifts.get(tenant, 0),
                    )
                )
            driver.step()
            seen.append([call.usage.completion_tokens - 1000 * call.request.preemptions for call in calls])
        assert sum(call.request.preemptions for call in calls) > 10
        return seen

    assert history({"acme": shift}) == history({"bolt": shift}) == history({})


@pytest.mark.parametrize("priority", [-100, 100])
def test_a_priority_does_not_take_the_oldest_calls_place(priority: int) -> None:
    driver = Driver(num_blocks=24)
    oldest = driver.submit(words(200), 100, tenant="bolt")  # more than half of the pool
    driver.step()
    others = [driver.submit(words(40, seed), 60, tenant="acme", priority=priority) for seed in range(1, 6)]
    driver.run()
    assert oldest.request.preemptions == 0
    assert sum(call.request.preemptions for call in others) > 0


def test_the_tenant_furthest_above_its_part_gives_way_first() -> None:
    driver = Driver(num_blocks=60, max_running=20, max_batch_tokens=512)
    driver.submit(words(10), 300, tenant="coda")  # below its part, so that others can be above theirs
    calls = {
        tenant: [
            driver.submit(words(60, seed + number), 30, tenant=tenant, priority=priority) for number in range(count)
        ]
        for tenant, count, seed, priority in (("acme", 6, 10, 5), ("bolt", 5, 40, -5))
    }
    driver.step()
    call = driver.submit(words(30, 80), 30, tenant="coda")
    while not driver.observations.preemptions:
        driver.step()
    assert call.request.state is RequestState.RUNNING
    assert [one.request.preemptions for one in calls["bolt"]] == [0] * 5
    assert [one.request.preemptions for one in calls["acme"]] == [0] * 5 + [1]


def test_there_is_a_sequence_for_each_tenant_while_there_are_as_many() -> None:
    driver = Driver(num_blocks=120, max_running=6, max_batch_tokens=64, weights={"acme": 50.0})
    for seed in range(20):
        driver.submit(words(20, seed), 60, tenant="acme")
    for _ in range(10):
        driver.step()
    assert driver.engine.report().running_sequences == 6
    calls = [driver.submit(words(10, seed), 60, tenant=f"t{seed}") for seed in range(5)]
    driver.step()
    assert [call.request.state for call in calls] == [RequestState.RUNNING] * 5
    assert driver.engine.report().running_sequences == 6


def test_a_large_call_gets_its_room_though_small_ones_of_another_tenant_keep_coming() -> None:
    driver = Driver(num_blocks=40, max_running=8, max_batch_tokens=64)
    for number in range(8):
        driver.submit(words(40, number), 20, tenant="acme")
    driver.step()
    large = driver.submit(words(400, 50), 100, tenant="bolt")  # 32 of 40 blocks
    for number in range(1500):
        if number % 3 == 0:
            driver.submit(words(40, number % 90), 20, tenant="acme")
        driver.engine.step()
        if large.end:
            break
    assert large.request.state is RequestState.ENDED
    driver.run()
    driver.assert_idle()


def test_a_tenant_that_waits_for_its_own_cap_holds_up_nobody() -> None:
    driver = Driver(num_blocks=64, shares={"acme": TenantShare(cap=8)})
    driver.submit(words(60), 60)
    driver.submit(words(60, 1), 60)
    driver.step()
    other = driver.submit(words(60, 2), 60, tenant="bolt")
    driver.step()
    assert other.request.state is RequestState.RUNNING
