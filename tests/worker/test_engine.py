"""The life of calls in the engine, driven step by step on the witness model."""

import itertools

import pytest
from grpc import StatusCode

from prefixgate.cache.accounts import TenantShare
from prefixgate.cache.admission import CacheMode
from prefixgate.cache.hashing import CacheScope
from prefixgate.cache.integrity import IntegrityError
from prefixgate.worker.model_runner import Row
from prefixgate.worker.request import End, RefusedError, SamplingParams
from prefixgate.worker.sequence import FinishReason
from prefixgate.worker.witness_options import WitnessOptions
from tests.worker.driver import MODEL, Driver, solo, words


def test_a_call_ends_once_with_all_its_tokens_and_its_usage() -> None:
    driver = Driver()
    call = driver.ask(words(20), 5)
    assert call.code is StatusCode.OK
    assert call.outputs == solo(words(20), 5)
    assert call.finished == {0: FinishReason.LENGTH}
    assert (call.usage.prompt_tokens, call.usage.completion_tokens) == (20, 5)
    driver.assert_idle()


@pytest.mark.parametrize("max_tokens", [1, 2, 15, 16, 17, 20])
@pytest.mark.parametrize("prompt_tokens", [1, 15, 16, 17, 31, 32, 33])
def test_a_prompt_sent_three_times_gives_the_same_text_and_never_hits_less(prompt_tokens: int, max_tokens: int) -> None:
    driver, prompt = Driver(), words(prompt_tokens)
    expected = solo(prompt, max_tokens)
    calls = [driver.ask(prompt, max_tokens) for _ in range(3)]
    for call in calls:
        assert call.outputs == expected
        assert len(call.outputs[0]) == call.usage.completion_tokens == max_tokens
        assert call.finished == {0: FinishReason.LENGTH}
        assert call.usage.cached_tokens <= prompt_tokens - 1
    hits = [call.usage.cached_tokens for call in calls]
    assert hits[0] == 0
    assert hits[2] >= hits[1] == prompt_tokens - 1
    idle = driver.cache.stats().cached_blocks
    driver.ask(prompt, max_tokens)
    assert driver.cache.stats().cached_blocks == idle
    driver.assert_idle()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_full_partial_and_cold_prompts_admitted_in_one_step_all_come_out_right(order: tuple[int, ...]) -> None:
    driver = Driver()
    warm = words(49)
    driver.ask(warm, 2)
    prompts = [warm, words(49, seed=3), warm[:24] + words(25, seed=5)]
    calls = {index: driver.submit(prompts[index], 6) for index in order}
    driver.run()
    for index, call in calls.items():
        assert call.outputs == solo(prompts[index], 6)
    assert [calls[index].usage.cached_tokens for index in range(3)] == [48, 0, 24]
    assert len(driver.runner.steps[2]) == 3, "all three were admitted in one step"


def test_equal_cold_prompts_admitted_in_one_step_agree() -> None:
    driver, prompt = Driver(), words(40)
    calls = [driver.submit(prompt, 6) for _ in range(8)]
    driver.run()
    expected = solo(prompt, 6)
    assert [call.outputs for call in calls] == [expected] * 8
    driver.assert_idle()


def test_the_next_turn_of_a_chat_hits_all_that_was_computed_before() -> None:
    driver, prompt = Driver(), words(21)
    first = driver.ask(prompt, 9)
    second_prompt = prompt + first.outputs[0] + words(7, seed=4)
    second = driver.ask(second_prompt, 5)
    # The last sampled token has no keys and values yet.
    assert second.usage.cached_tokens == 21 + 9 - 1
    assert second.usage.claimed_tail_tokens == (21 + 9 - 1) % 16
    assert second.outputs == solo(second_prompt, 5)


def test_a_rebuilt_history_does_not_answer_for_the_old_one() -> None:
    driver, prompt = Driver(), words(15)
    answer = driver.ask(prompt, 2).outputs[0]
    other = answer[0] % 90 + 33
    question = words(5, seed=8)
    driver.ask([*prompt, other, *question], 3)
    for continued in ([*prompt, answer[0], *question], [*prompt, other, *question]):
        assert driver.ask(continued, 4).outputs == solo(continued, 4)


def test_questions_after_one_system_prompt_share_it_and_nothing_else() -> None:
    driver, system = Driver(num_blocks=12), words(40)
    for seed in range(1, 5):
        prompt = system + words(9, seed)
        call = driver.ask(prompt, 4)
        assert call.outputs == solo(prompt, 4)
        assert call.usage.cached_tokens == (40 if seed > 1 else 0)


def test_tenants_and_salts_do_not_share() -> None:
    driver, prompt = Driver(), words(40)
    driver.ask(prompt, 3)
    assert driver.ask(prompt, 3).usage.cached_tokens == 39
    for scope in ({"tenant": "bolt"}, {"salt": "private"}):
        call = driver.ask(prompt, 3, **scope)
        assert call.usage.cached_tokens == 0
        assert call.outputs == solo(prompt, 3, **scope)  # type: ignore[arg-type]


def test_hits_are_counted_when_a_call_is_admitted_and_not_when_it_came() -> None:
    driver = Driver(num_blocks=12)
    prompt = words(65)
    driver.ask(prompt, 1)
    hogs = [driver.submit(words(80, seed), 16) for seed in (1, 2)]
    driver.step()
    late = driver.submit(prompt, 1)
    driver.run()
    assert late.usage.cached_tokens == 0, "the hogs evicted it while the call waited"
    assert late.outputs == solo(prompt, 1)
    assert [hog.outputs for hog in hogs] == [solo(words(80, seed), 16) for seed in (1, 2)]


class TestOutputs:
    def test_outputs_share_the_prompt_and_the_last_of_them_keeps_its_tail(self) -> None:
        driver, prompt = Driver(), words(20)
        sampling = SamplingParams(6, temperature=1.0, seed=11)
        call = driver.ask(prompt, n=3, sampling=sampling)
        assert call.outputs == solo(prompt, n=3, sampling=sampling)
        assert len({tuple(ids) for ids in call.outputs.values()}) > 1
        assert call.usage.copied_blocks == 2
        assert call.usage.completion_tokens == 18
        assert sum(driver.runner.tokens_per_step) == 20 + 3 * 5, "the prompt is computed once"
        driver.assert_idle()

    def test_a_prompt_of_whole_blocks_is_forked_without_a_copy(self) -> None:
        call = Driver().ask(words(32), 5, n=4)
        assert call.usage.copied_blocks == 0
        assert call.outputs == dict.fromkeys(range(4), solo(words(32), 5)[0])

    def test_cached_tokens_are_reported_once_however_many_outputs_there_are(self) -> None:
        driver = Driver()
        driver.ask(words(40), 2)
        assert driver.ask(words(40), 2, n=4).usage.cached_tokens == 39

    def test_the_pool_may_be_as_small_as_the_call(self) -> None:
        needed = Driver().cache.blocks_needed(20, 30, 3)
        driver = Driver(num_blocks=needed)
        call = driver.ask(words(20), 30, n=3)
        assert call.outputs == dict.fromkeys(range(3), solo(words(20), 30)[0])
        with pytest.raises(RefusedError, match=f"can need {needed} blocks of 16 tokens; of the pool"):
            Driver(num_blocks=needed - 1).submit(words(20), 30, n=3)

    @pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 5])
    @pytest.mark.parametrize("output", [0, 1, 2])
    def test_a_cancelled_output_stops_and_the_others_go_on(self, output: int, steps_before: int) -> None:
        driver, prompt = Driver(max_batch_tokens=16, max_running=8), words(40)
        sampling = SamplingParams(5, temperature=1.0, seed=3)
        call = driver.submit(prompt, n=3, sampling=sampling)
        for _ in range(steps_before):
            driver.step()
        driver.engine.cancel(call.request, output)
        driver.run()
        expected = solo(prompt, n=3, sampling=sampling)
        assert call.code is StatusCode.OK
        assert call.finished[output] is FinishReason.STOP
        for index in range(3):
            heard = call.outputs.get(index, [])
            assert heard == expected[index][: len(heard)]
            assert (len(heard) == 5) == (index != output)
        driver.assert_idle()

    @pytest.mark.parametrize("steps_before", [0, 1, 4])
    def test_a_call_ends_well_when_its_outputs_are_cancelled_one_by_one(self, steps_before: int) -> None:
        driver = Driver(max_batch_tokens=16, max_running=8)
        call = driver.submit(words(40), 50, n=2)
        for _ in range(steps_before):
            driver.step()
        for output in (0, 0, 7, 1):
            driver.engine.cancel(call.request, output)
        driver.run()
        assert call.code is StatusCode.OK
        assert call.finished == dict.fromkeys(range(2), FinishReason.STOP)
        driver.assert_idle()


class TestCacheControl:
    def test_a_read_only_call_hits_and_leaves_nothing(self) -> None:
        driver = Driver()
        driver.ask(words(40), 2)
        before = driver.cache.stats().cached_blocks
        for _ in range(2):
            call = driver.ask([*words(40), *words(30, 5)], 4, cache_mode=CacheMode.READ_ONLY)
            assert call.usage.cached_tokens == 40
            assert call.outputs == solo([*words(40), *words(30, 5)], 4)
        assert driver.cache.stats().cached_blocks == before
        driver.assert_idle()

    def test_a_bypassing_call_neither_hits_nor_leaves_anything(self) -> None:
        driver = Driver()
        driver.ask(words(40), 2)
        before = driver.cache.stats().cached_blocks
        for prompt in (words(40), words(40, 5), words(40, 5)):
            call = driver.ask(prompt, 4, cache_mode=CacheMode.BYPASS)
            assert call.usage.cached_tokens == 0
            assert call.outputs == solo(prompt, 4)
        assert driver.cache.stats().cached_blocks == before
        driver.assert_idle()

    def test_blocks_of_low_retention_go_first_and_those_of_high_retention_last(self) -> None:
        driver = Driver(num_blocks=12)
        driver.ask(words(48, 1), 1, retention=90)
        driver.ask(words(48, 2), 1)
        driver.ask(words(48, 3), 1, retention=10)
        driver.ask(words(60, 4), 1)
        driver.ask(words(60, 5), 1)
        hits = [driver.cache.match(CacheScope("acme", MODEL), words(48, seed)).cached_tokens for seed in (1, 2, 3)]
        assert hits == [47, 16, 0]

    def test_a_call_beyond_what_the_tenants_share_can_ever_be_is_refused_with_the_numbers(self) -> None:
        shares = {"acme": TenantShare(floor=4, cap=6), "bolt": TenantShare(floor=8)}
        driver = Driver(num_blocks=20, shares=shares)
        for tenant, ceiling in (("acme", 6), ("bolt", 16), ("other", 8)):
            tokens = ceiling * 16
            assert driver.ask(words(tokens - 3), 4, tenant=tenant).code is StatusCode.OK
            with pytest.raises(RefusedError) as refused:
                driver.submit(words(tokens - 3), 5, tenant=tenant)
            assert refused.value.end.code is StatusCode.INVALID_ARGUMENT
            assert f"can need {ceiling + 1} blocks of 16 tokens" in refused.value.end.message
            assert f"of the pool's 20 the tenant can have {ceiling}" in refused.value.end.message


class TestEnds:
    def test_an_eos_id_ends_an_output_and_counts(self) -> None:
        options = WitnessOptions(eos_every=1, context=2048)
        driver = Driver(options=options)
        call = driver.ask(words(20), 9, n=3)
        assert [len(ids) for ids in call.outputs.values()] == [1, 1, 1]
        assert call.outputs[0][0] in driver.runner.spec.eos_ids
        assert call.finished == dict.fromkeys(range(3), FinishReason.STOP)
        assert call.usage.completion_tokens == 3
        driver.assert_idle()

    def test_ignore_eos_lets_an_output_go_on(self) -> None:
        driver = Driver(options=WitnessOptions(eos_every=1, context=2048))
        call = driver.ask(words(20), sampling=SamplingParams(9, ignore_eos=True))
        assert call.finished == {0: FinishReason.LENGTH}
        assert call.usage.completion_tokens == 9

    def test_a_stop_id_ends_an_output_and_is_part_of_it(self) -> None:
        expected = solo(words(20), 9)[0]
        stop_id = expected[4]
        call = Driver().ask(words(20), sampling=SamplingParams(9, stop_ids=frozenset({stop_id, 255})))
        assert call.outputs[0] == expected[: expected.index(stop_id) + 1]
        assert call.finished == {0: FinishReason.STOP}

    def test_a_stop_id_as_last_allowed_token_is_a_stop(self) -> None:
        expected = solo(words(20), 1)[0]
        call = Driver().ask(words(20), sampling=SamplingParams(1, stop_ids=frozenset(expected)))
        assert call.finished == {0: FinishReason.STOP}

    @pytest.mark.parametrize("stops_after", range(1, 17))
    def test_calls_stopped_anywhere_in_a_block_do_not_change_later_ones(self, stops_after: int) -> None:
        driver, prompt = Driver(), words(20)
        call = driver.submit(prompt, 40)
        while len(call.outputs.get(0, [])) < stops_after:
            driver.step()
        driver.engine.cancel(call.request, 0)
        driver.run()
        longer = prompt + call.outputs[0]
        for target in (prompt, longer, [*longer, 50], [*longer[:-1], 51, 52]):
            assert driver.ask(target, 6).outputs == solo(target, 6)

    @pytest.mark.parametrize("steps_before", range(7))
    def test_a_call_can_be_cancelled_in_every_state(self, steps_before: int) -> None:
        driver = Driver(max_batch_tokens=16, max_running=8)
        other = driver.submit(words(20, seed=2), 12)
        for _ in range(3):
            call = driver.submit(words(40), 50, n=2)
            for _ in range(steps_before):
                driver.step()
            driver.engine.cancel(call.request)
            driver.engine.cancel(call.request)
            driver.step()
            assert call.code is StatusCode.CANCELLED
            assert call.request.usage.completion_tokens == sum(map(len, call.outputs.values()))
        driver.run()
        assert other.outputs == solo(words(20, seed=2), 12)
        driver.assert_idle()

    def test_a_cancelled_call_computes_nothing_more(self) -> None:
        driver = Driver()
        call = driver.submit(words(20), 1000)
        for _ in range(4):
            driver.step()
        driver.engine.cancel(call.request)
        assert not driver.step()
        assert len(driver.runner.steps) == 4

    def test_a_cancel_that_comes_after_the_end_is_of_no_effect(self) -> None:
        driver = Driver()
        call = driver.ask(words(20), 2)
        driver.engine.cancel(call.request)
        driver.engine.cancel(call.request, 0)
        driver.step()
        assert call.code is StatusCode.OK

    @pytest.mark.parametrize("running", [True, False])
    def test_a_deadline_ends_a_call_whether_it_runs_or_waits(self, running: bool) -> None:
        driver = Driver(max_running=1)
        if not running:
            driver.submit(words(20, seed=1), 100)
        call = driver.submit(words(20), 1000, deadline_seconds=2.5)
        driver.step()
        driver.now += 2.4
        driver.step()
        assert call.end is None
        assert (call.usage.completion_tokens > 0) == running
        driver.now += 0.1
        driver.step()
        assert call.code is StatusCode.DEADLINE_EXCEEDED
        driver.run()
        driver.assert_idle()

    def test_end_all_ends_calls_in_every_state_and_frees_their_blocks(self) -> None:
        driver = Driver(max_batch_tokens=32, max_running=3)
        calls = [driver.submit(words(40, seed), 100, n=2) for seed in range(3)]
        driver.step()
        calls.append(driver.submit(words(40, 9), 100))
        driver.engine.end_all(End(StatusCode.UNAVAILABLE, "the worker is shutting down"))
        assert [call.code for call in calls] == [StatusCode.UNAVAILABLE] * 4
        driver.assert_idle()


class TestQueue:
    def test_calls_that_are_too_many_to_wait_are_refused_newest_first(self) -> None:
        driver = Driver(max_running=1, max_waiting=2)
        calls = [driver.submit(words(20, seed), 5) for seed in range(3)]
        with pytest.raises(RefusedError, match="lets 2 calls wait") as refused:
            driver.submit(words(20), 5)
        assert refused.value.end.code is StatusCode.RESOURCE_EXHAUSTED
        driver.step()
        driver.now += 6.5
        calls += [driver.submit(words(20, seed), 5) for seed in (4,)]
        driver.step()
        assert [call.code for call in calls] == [None, None, None, StatusCode.RESOURCE_EXHAUSTED]
        end = calls[3].end
        assert end is not None
        assert end.retry_seconds == 7, "as long as the first in line has waited, rounded up"
        assert "try again in 7 seconds" in end.message
        driver.run()
        assert [call.code for call in calls[:3]] == [StatusCode.OK] * 3

    def test_where_too_many_wait_those_of_the_tenant_with_most_are_refused(self) -> None:
        driver = Driver(max_running=1, max_waiting=4, weights={"bolt": 2.0})
        driver.submit(words(20), 5)
        driver.step()
        flood = [driver.submit(words(20, seed), 5) for seed in range(4)]
        driver.step()
        others = [driver.submit(words(20, seed), 5, tenant="bolt") for seed in range(4)]
        driver.step()
        refused = StatusCode.RESOURCE_EXHAUSTED
        assert [call.code for call in flood] == [None, refused, refused, refused]
        assert [call.code for call in others] == [None, None, None, refused]
        third = driver.submit(words(20), 5, tenant="third")
        driver.step()
        assert third.code is None
        assert [call.code for call in others[:3]] == [None, None, refused], "three for weight 2 are more than one for 1"
        driver.run()
        driver.assert_idle()

    def test_a_flood_at_the_door_shuts_it_for_its_tenant_alone(self) -> None:
        driver = Driver(max_running=2, max_waiting=3)
        for seed in range(5):
            driver.submit(words(20, seed), 5)
        with pytest.raises(RefusedError):
            driver.submit(words(20), 5)
        assert driver.submit(words(20), 5, tenant="bolt").end is None

    def test_a_call_that_was_preempted_has_begun_and_is_not_refused(self) -> None:
        driver = Driver(num_blocks=15, max_running=3, max_waiting=0)
        calls = [driver.submit(words(40, seed), 100) for seed in range(3)]
        driver.run()
        assert sum(call.request.preemptions for call in calls) > 0
        assert [call.code for call in calls] == [StatusCode.OK] * 3

    def test_with_no_waiting_allowed_a_call_that_can_start_at_once_still_runs(self) -> None:
        driver = Driver(max_waiting=0)
        assert driver.ask(words(20), 3).code is StatusCode.OK

    def test_more_outputs_than_can_ever_run_are_refused_with_the_bound(self) -> None:
        with pytest.raises(RefusedError, match="n: 17 outputs; this worker runs at most 16"):
            Driver().submit(words(20), 1, n=17)

    def test_a_call_that_needs_the_whole_pool_evicts_whatever_is_idle(self) -> None:
        driver = Driver(num_blocks=16)
        for seed in range(4):
            driver.ask(words(60, seed), 4)
        assert driver.cache.stats().free_blocks == 0
        call = driver.ask(words(200, 7), 57)
        assert call.outputs == solo(words(200, 7), 57)

    def test_a_large_call_at_the_head_is_not_passed_for_ever(self) -> None:
        driver = Driver(num_blocks=10)
        driver.submit(words(60), 20)
        large = driver.submit(words(100, 1), 50)
        small = [driver.submit(words(10, seed), 4) for seed in range(2, 6)]
        driver.run()
        assert large.outputs == solo(words(100, 1), 50)
        assert large.request.first_token_at is not None
        assert [call.outputs for call in small] == [solo(words(10, seed), 4) for seed in range(2, 6)]

    def test_after_a_close_nothing_more_is_taken(self) -> None:
        driver = Driver()
        driver.engine.inbox.close()
        with pytest.raises(RefusedError) as refused:
            driver.submit(words(20), 1)
        assert refused.value.end.code is StatusCode.UNAVAILABLE


class TestTimes:
    def test_usage_tells_how_long_a_call_waited_and_when_its_first_token_came(self) -> None:
        driver = Driver(max_running=1)
        driver.submit(words(20, 1), 2)
        call = driver.submit(words(20), 2)
        driver.step()
        driver.now += 3.0
        driver.run()
        assert call.usage.queue_seconds == 3.0
        assert call.usage.first_token_seconds == 3.0

    def test_the_report_counts_what_no_step_has_seen_yet_as_waiting(self) -> None:
        driver = Driver(max_running=2)
        driver.submit(words(20), 50, n=2)
        driver.submit(words(20), 5)
        assert driver.engine.report().waiting_calls == 2
        driver.step()
        report = driver.engine.report()
        assert (report.running_calls, report.running_sequences, report.waiting_calls) == (1, 2, 1)
        driver.now += 7.0
        assert driver.engine.report().oldest_call_seconds == 7.0
        assert report.free_blocks + report.active_blocks + report.cached_blocks == report.total_blocks

    def test_figures_fall_to_zero_when_all_clients_leave_at_once(self) -> None:
        driver = Driver(max_running=8)
        calls = [driver.submit(words(20, seed), 100) for seed in range(20)]
        for _ in range(3):
            driver.step()
        for call in calls:
            driver.engine.cancel(call.request)
        driver.step()
        driver.assert_idle()
        assert driver.engine.report().oldest_call_seconds == 0.0


def test_a_call_is_seen_running_while_the_model_runs_it_for_the_first_time() -> None:
    driver = Driver()
    seen = []

    def look(_: Row) -> bool:
        seen.append(driver.engine.report())
        return False

    driver.runner.raises = look
    driver.ask(words(40), 1)
    (report,) = seen
    assert (report.running_calls, report.waiting_calls, report.active_blocks) == (1, 0, 3)


def test_a_broken_invariant_is_counted_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise IntegrityError("block 3 has 1 references and is held 0 times")

    driver = Driver()
    driver.engine.check_integrity()
    assert driver.engine.report().integrity_violations == 0
    with monkeypatch.context() as patched:
        patched.setattr(driver.cache, "check_integrity", broken)
        driver.engine.check_integrity()
    assert (driver.engine.report().integrity_checks, driver.engine.report().integrity_violations) == (2, 1)
    assert driver.ask(words(40), 2).outputs == solo(words(40), 2)
