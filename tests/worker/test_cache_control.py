"""What a tenant asks of the cache, through an engine."""

import threading

import pytest
from grpc import StatusCode

from prefixgate.cache.accounts import TenantShare
from prefixgate.cache.hashing import CacheScope
from prefixgate.cache.matching import Explanation, MissReason
from prefixgate.worker.cache_control import CacheControl, Flushed, PinnedPrefix, Standing
from prefixgate.worker.engine_thread import EngineThread
from prefixgate.worker.request import End, RefusedError
from tests.worker.driver import MODEL, Driver, words

HANG_SECONDS = 60.0
ACME, BOLT, SALTED = CacheScope("acme", MODEL), CacheScope("bolt", MODEL), CacheScope("acme", MODEL, salt="s")


def pin(driver: Driver, token_ids: list[int], seconds: float = 60.0, scope: CacheScope = ACME) -> PinnedPrefix:
    return driver.control(lambda control: control.pin(scope, token_ids, seconds), scope.tenant)


def explain(driver: Driver, token_ids: list[int], scope: CacheScope = ACME) -> Explanation:
    return driver.control(lambda control: control.explain(scope, token_ids), scope.tenant)


def refusal(driver: Driver, token_ids: list[int], scope: CacheScope = ACME) -> End:
    with pytest.raises(RefusedError) as refused:
        pin(driver, token_ids, scope=scope)
    return refused.value.end


def flood(driver: Driver, seed: int = 50) -> None:
    """Fill the pool with others' prompts until nothing that may go is left of what was before."""
    for other in range(seed, seed + 30):
        driver.ask(words(100, other), 4, tenant="bolt")


class TestExplain:
    def test_tells_what_a_call_with_the_prompt_then_finds(self) -> None:
        driver = Driver()
        prompt = words(60)
        assert explain(driver, prompt).reason is MissReason.NEVER_SEEN
        driver.ask(prompt)
        for asked in (prompt, [*prompt[:40], *words(30, 7)], words(60, 9), prompt[:20]):
            found = explain(driver, asked)
            assert driver.ask(asked, 1).usage.cached_tokens == found.missed_at

    def test_other_tenants_and_other_salts_look_as_if_never_seen(self) -> None:
        driver = Driver(num_blocks=16)
        driver.ask(words(60))
        nothing = Explanation(0, 0, 0, MissReason.NEVER_SEEN, 0, 0, 0)
        for scope in (BOLT, SALTED):
            assert explain(driver, words(60), scope) == nothing
            assert explain(driver, [*words(30), *words(30, 5)], scope) == nothing
        flood(driver)
        assert explain(driver, words(60)).reason is MissReason.EVICTED
        assert explain(driver, words(60), SALTED) == nothing


class TestPins:
    def test_a_pinned_prefix_survives_a_flood_until_its_time_comes(self) -> None:
        driver = Driver(num_blocks=16, pin_limit=4)
        driver.ask(words(60))
        assert pin(driver, words(60), 30.0).tokens == 48
        flood(driver)
        assert explain(driver, words(60)).block_hit_tokens == 48
        driver.now += 29.0
        flood(driver, 100)
        assert explain(driver, words(60)).block_hit_tokens == 48
        driver.now += 1.0
        flood(driver)
        assert explain(driver, words(60)).block_hit_tokens == 0
        driver.assert_idle()

    def test_a_pin_is_listed_for_its_tenant_until_it_is_ended_and_for_nobody_else(self) -> None:
        driver = Driver(pin_limit=8)
        driver.ask(words(40))
        driver.ask(words(20), salt="s")
        later, sooner = pin(driver, words(40), 60.0), pin(driver, words(20), 20.0, SALTED)
        assert driver.control(lambda control: control.pins("acme")) == [sooner, later]
        assert (sooner.salt, sooner.tokens, sooner.expires_in_seconds) == ("s", 16, 20.0)
        assert driver.control(lambda control: control.pins("bolt"), "bolt") == []
        for tenant, pin_id in (("bolt", later.pin_id), ("acme", later.pin_id ^ 1), ("acme", None)):
            with pytest.raises(RefusedError) as refused:
                driver.control(lambda control, t=tenant, i=pin_id: control.unpin(t, i), tenant)  # type: ignore[misc]
            assert refused.value.end == End(StatusCode.NOT_FOUND, "pin_id: there is no such pin", field="pin_id")
        driver.control(lambda control: control.unpin("acme", later.pin_id))
        driver.now += 5.0
        assert driver.control(lambda control: control.pins("acme")) == [sooner._replace(expires_in_seconds=15.0)]

    def test_the_same_prefix_is_pinned_once_and_for_longer(self) -> None:
        driver = Driver(pin_limit=8)
        driver.ask(words(40))
        first = pin(driver, words(40), 10.0)
        assert pin(driver, words(44), 30.0) == first._replace(expires_in_seconds=30.0)
        assert pin(driver, words(40), 20.0) == first._replace(expires_in_seconds=30.0)

    def test_refusals_name_the_numbers_and_nothing_of_others(self) -> None:
        driver = Driver(pin_limit=4)
        driver.ask(words(60), tenant="bolt")
        driver.ask(words(40))
        pin(driver, words(60), scope=BOLT)
        end = refusal(driver, words(40))
        assert end.code is StatusCode.RESOURCE_EXHAUSTED
        assert "2 cached blocks of 16 tokens" in end.message
        assert "of this worker's 64 blocks all pins together may hold 4" in end.message
        assert driver.cache.stats().pinned_blocks == 3

    @pytest.mark.parametrize("scope", [BOLT, SALTED])
    def test_what_is_not_cached_cannot_be_pinned_and_leaves_nothing(self, scope: CacheScope) -> None:
        driver = Driver(pin_limit=4)
        driver.ask(words(40))
        end = refusal(driver, words(40), scope)
        assert end.code is StatusCode.FAILED_PRECONDITION
        assert "none of the prompt's 2 whole blocks of 16 tokens is cached" in end.message
        assert refusal(driver, words(15)).code is StatusCode.FAILED_PRECONDITION
        assert len(driver.cache.pins) == 0
        driver.assert_idle()

    def test_a_pin_ends_in_time_at_an_engine_that_rests(self) -> None:
        driver = Driver(pin_limit=4)
        driver.ask(words(40))
        pin(driver, words(40), 30.0)
        stepped = threading.Event()
        expire = driver.cache.expire

        def expiring(now: float) -> int:
            ended = expire(now)
            if ended:
                stepped.set()
            return ended

        driver.cache.expire = expiring  # type: ignore[method-assign]
        driver.now += 29.99
        assert driver.engine.seconds_to_expiry() == pytest.approx(0.01)
        thread = EngineThread(driver.engine, lambda: None, idle_seconds=0.0)
        driver.engine.step()
        assert not stepped.is_set()
        driver.now += 0.01
        thread.start()
        assert stepped.wait(HANG_SECONDS)
        thread.stop(End(StatusCode.UNAVAILABLE))
        assert thread.join(HANG_SECONDS)
        assert driver.engine.seconds_to_expiry() is None


class TestCallsThatPin:
    def test_a_call_with_a_time_to_live_leaves_its_prompt_pinned(self) -> None:
        driver = Driver(num_blocks=16, pin_limit=4)
        assert driver.ask(words(60), pin_seconds=30.0).usage.pinned_tokens == 48
        flood(driver)
        again = driver.ask(words(60), pin_seconds=60.0)
        assert (again.usage.block_hit_tokens, again.usage.pinned_tokens) == (48, 48)
        (only,) = driver.control(lambda control: control.pins("acme"))
        assert only.expires_in_seconds == 60.0

    def test_a_pin_that_cannot_be_had_is_told_and_hurts_no_answer(self) -> None:
        driver = Driver(pin_limit=2)
        call = driver.ask(words(60), pin_seconds=30.0)
        assert (call.code, call.usage.pinned_tokens) == (StatusCode.OK, 0)
        assert call.usage.completion_tokens == 4

    def test_a_call_that_does_not_end_well_pins_nothing(self) -> None:
        driver = Driver(pin_limit=8)
        call = driver.submit(words(60), 500, pin_seconds=30.0)
        driver.step()
        driver.step()
        driver.engine.cancel(call.request)
        driver.run()
        assert (call.code, call.usage.pinned_tokens) == (StatusCode.CANCELLED, 0)
        assert driver.cache.stats().pinned_blocks == 0

    def test_where_nothing_can_be_pinned_it_is_refused_at_the_door(self) -> None:
        driver = Driver()
        with pytest.raises(RefusedError, match=r"^cache\.ttl_seconds: 30 at a worker that allows no pins"):
            driver.submit(words(60), pin_seconds=30.0)


class TestFlush:
    def test_the_next_call_is_cold_for_this_tenant_and_salt_alone(self) -> None:
        driver = Driver()
        for tenant, salt in (("acme", ""), ("acme", "s"), ("bolt", "")):
            driver.ask(words(60), tenant=tenant, salt=salt)
        assert driver.control(lambda control: control.flush("acme", "s")) == Flushed(4, 0)
        found = [
            driver.ask(words(60), 1, tenant=tenant, salt=salt).usage.cached_tokens
            for tenant, salt in (("acme", ""), ("acme", "s"), ("bolt", ""))
        ]
        assert found == [59, 0, 59]
        driver.control(lambda control: control.flush("acme", None))
        found = [
            driver.ask(words(60), 1, tenant=tenant, salt=salt).usage.cached_tokens
            for tenant, salt in (("acme", ""), ("acme", "s"), ("bolt", ""))
        ]
        assert found == [0, 0, 59]

    def test_pins_on_what_is_flushed_end_and_others_stay(self) -> None:
        driver = Driver(pin_limit=8)
        for scope in (ACME, SALTED, BOLT):
            driver.ask(words(40), tenant=scope.tenant, salt=scope.salt)
            pin(driver, words(40), scope=scope)
        assert driver.control(lambda control: control.flush("acme", "s")) == Flushed(3, 1)
        assert driver.cache.stats().pinned_blocks == 4
        assert driver.control(lambda control: control.flush("acme", None)) == Flushed(3, 1)
        assert driver.cache.stats().pinned_blocks == 2
        assert explain(driver, words(40), BOLT).block_hit_tokens == 32

    def test_calls_in_progress_go_on_and_leave_nothing_to_be_found(self) -> None:
        driver = Driver()
        call = driver.submit(words(60), 40)
        driver.step()
        driver.step()
        driver.control(lambda control: control.flush("acme", None))
        driver.run()
        assert call.outputs == Driver().ask(words(60), 40).outputs
        assert explain(driver, words(60)).reason is MissReason.NEVER_SEEN
        driver.assert_idle()


def test_a_day_with_a_system_prompt_goes_as_the_page_tells() -> None:
    driver = Driver(num_blocks=64, pin_limit=6)
    prompt = words(100)
    assert explain(driver, prompt) == Explanation(0, 0, 0, MissReason.NEVER_SEEN, 0, 0, 0)
    warm = driver.warm(prompt, pin_seconds=3600.0)
    assert (warm.prefilled[-1], warm.usage.pinned_tokens) == (100, 96)
    found = explain(driver, prompt)
    assert (found.missed_at, found.reason) == (99, MissReason.NONE)
    assert driver.ask([*prompt, *words(20, 7)]).usage.cached_tokens == 100
    found = explain(driver, [*prompt[:40], *words(60, 7)])
    assert (found.missed_at, found.reason, found.diverged_at) == (40, MissReason.DIVERGED, 8)
    assert found.continuation_tokens == 8
    (first,) = driver.control(lambda control: control.pins("acme"))
    flood(driver)
    assert explain(driver, prompt).missed_at == 96
    driver.now += 60.0
    assert pin(driver, prompt, 3600.0) == first._replace(expires_in_seconds=3600.0)
    assert driver.control(lambda control: control.flush("acme", None)) == Flushed(6, 1)
    assert explain(driver, prompt) == Explanation(0, 0, 0, MissReason.NEVER_SEEN, 0, 0, 0)


def test_a_tenant_is_told_of_its_own_standing_and_nothing_of_others() -> None:
    driver = Driver(max_running=1, pin_limit=4, shares={"acme": TenantShare(floor=2, cap=40)})
    driver.ask(words(40))
    pin(driver, words(40))
    driver.submit(words(20, 1), 500)
    driver.submit(words(20, 2), 500)
    driver.submit(words(20, 3), 500, tenant="bolt")
    driver.step()

    def standing(tenant: str) -> Standing:
        return driver.control(lambda control: control.standing(tenant), tenant)

    acme = standing("acme")
    assert (acme.running_calls, acme.waiting_calls, acme.pins, acme.pinned_blocks) == (1, 1, 1, 2)
    assert (acme.floor_blocks, acme.cap_blocks, acme.cached_blocks) == (2, 40, 1)
    assert acme.active_blocks >= 4
    assert standing("bolt") == Standing(0, 0, 0, 64, 0, 1, 0, 0)
    assert standing("nobody") == Standing(0, 0, 0, 64, 0, 0, 0, 0)


def test_the_work_is_done_on_the_engines_thread() -> None:
    driver = Driver()
    thread = EngineThread(driver.engine, lambda: None)
    thread.start()

    def where(_: CacheControl) -> str:
        return threading.current_thread().name

    assert driver.engine.questions.ask("acme", where).result(HANG_SECONDS) == "engine"
    thread.stop(End(StatusCode.UNAVAILABLE))
    assert thread.join(HANG_SECONDS)
