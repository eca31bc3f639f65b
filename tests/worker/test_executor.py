"""The computing of steps: chunks, and faults that stay with the call they belong to."""

import pytest
from grpc import StatusCode

from prefixgate.worker.executor import MAX_FAILED_STEPS, ExecutorFailedError
from prefixgate.worker.model_runner import Row
from prefixgate.worker.request import SamplingParams
from prefixgate.worker.token_set import TokenSet
from tests.worker.driver import Driver, solo, words

POISON_ID = 255


def poisoned(row: Row) -> bool:
    return POISON_ID in row.token_ids


class TestChunks:
    @pytest.mark.parametrize("uncached", [1, 2, 15, 16, 17, 31, 32, 33, 48])
    def test_whatever_is_left_after_a_hit_is_computed_in_chunks_without_an_empty_one(self, uncached: int) -> None:
        driver = Driver(max_batch_tokens=16, max_running=1)
        head = words(64)
        driver.ask(head, 1)
        done = len(driver.runner.steps)
        prompt = head + words(uncached, seed=3)
        call = driver.ask(prompt, 3)
        assert call.outputs == solo(prompt, 3)
        assert call.usage.cached_tokens == 64
        counts = driver.runner.tokens_per_step[done:]
        assert counts == [16] * (uncached // 16) + [uncached % 16] * (uncached % 16 > 0) + [1, 1]

    def test_chunks_that_are_no_multiple_of_a_block_are_named_from_the_sequences_start(self) -> None:
        driver, prompt = Driver(max_batch_tokens=100), words(200)
        driver.ask(prompt, 1)
        assert driver.runner.steps == [[(0, 100)], [(100, 100)]]
        again = driver.ask(prompt, 1)
        assert again.usage.block_hit_tokens == 192
        inner = driver.ask(prompt[96:112] + words(4, seed=2), 1)
        assert inner.usage.cached_tokens == 0

    @pytest.mark.parametrize("budget", [3, 7, 16, 17])
    def test_the_text_does_not_depend_on_the_budget(self, budget: int) -> None:
        driver = Driver(max_batch_tokens=budget, max_running=2)
        prompts = [words(33, seed) for seed in range(5)]
        calls = [driver.submit(prompt, 6) for prompt in prompts]
        driver.run()
        assert [call.outputs for call in calls] == [solo(prompt, 6) for prompt in prompts]
        assert max(driver.runner.tokens_per_step) <= budget

    def test_a_step_never_computes_more_than_its_budget_however_much_is_cached(self) -> None:
        driver = Driver(num_blocks=512, max_batch_tokens=64, max_running=50)
        head = words(152)
        driver.ask(head, 1)
        calls = [driver.submit(head + words(8, seed), 3) for seed in range(1, 51)]
        driver.run()
        assert max(driver.runner.tokens_per_step) <= 64
        assert all(call.usage.cached_tokens >= 144 for call in calls)
        assert driver.engine.report().computed_tokens == sum(driver.runner.tokens_per_step)

    def test_decodes_are_not_held_up_by_a_long_prompt(self) -> None:
        driver = Driver(max_batch_tokens=32)
        short = driver.submit(words(16), 40)
        driver.step()
        driver.submit(words(600, 3), 1)
        for tokens in range(2, 20):
            driver.step()
            assert len(short.outputs[0]) == tokens
        assert driver.runner.tokens_per_step[1:19] == [32] * 18


class TestFaults:
    def test_a_prompt_that_the_model_fails_on_ends_alone(self) -> None:
        driver = Driver()
        driver.runner.raises = poisoned
        prompts = [words(20, seed) for seed in range(3)]
        good = [driver.submit(prompt, 5) for prompt in prompts[:2]]
        bad = driver.submit([*words(20), POISON_ID], 5)
        good.append(driver.submit(prompts[2], 5))
        driver.run()
        assert bad.code is StatusCode.INTERNAL
        assert [call.outputs for call in good] == [solo(prompt, 5) for prompt in prompts]
        driver.assert_idle()

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_that_cannot_be_sampled_ends_its_call_alone(self, temperature: float) -> None:
        driver = Driver()
        nothing = SamplingParams(5, temperature, allowed_ids=TokenSet.of([65]), banned_ids=TokenSet.of([65]))
        good = driver.submit(words(20), 5)
        bad = driver.submit(words(20, 3), sampling=nothing, n=2)
        driver.run()
        assert (bad.code, bad.outputs) == (StatusCode.INTERNAL, {})
        assert good.outputs == solo(words(20), 5)
        driver.assert_idle()

    def test_what_an_exception_says_is_not_told_to_the_client(self) -> None:
        driver = Driver()
        driver.runner.raises = poisoned
        bad = driver.ask([POISON_ID], 5)
        assert bad.end is not None
        assert bad.end.message == "the call failed in the worker"

    @pytest.mark.parametrize("poison_at", [0, 15, 16, 40, 63])
    def test_non_finite_logits_end_their_call_alone_and_nothing_of_it_is_reused(self, poison_at: int) -> None:
        driver = Driver(num_blocks=24, max_batch_tokens=32)
        spoilt = words(64)
        spoilt[poison_at] = POISON_ID
        # Everything at and after the spoilt slot is spoilt too, as it would be by NaN keys and values.
        driver.runner.spoils = lambda row: row.start + len(row.token_ids) > poison_at and len(row.token_ids) > 1
        bad = driver.submit(spoilt, 4)
        while bad.end is None:
            driver.step()
        assert bad.end.message == "the model gave non-finite logits"
        driver.runner.spoils = lambda row: False
        again = driver.ask(spoilt, 4)
        assert again.usage.cached_tokens <= poison_at // 32 * 32
        assert again.outputs == solo(spoilt, 4)
        for seed in range(20):
            prompt = words(64, seed)
            assert driver.ask(prompt, 4).outputs == solo(prompt, 4)
        driver.assert_idle()

    def test_a_fault_amid_decoding_ends_all_outputs_of_its_call_and_no_other_call(self) -> None:
        driver = Driver()
        other = driver.submit(words(20, 5), 12)
        sampling = SamplingParams(12, temperature=1.0, seed=1)
        call = driver.submit(words(20), n=3, sampling=sampling, tenant="bolt")
        driver.runner.spoils = lambda row: row.start == 22 and row.scope.tenant == "bolt"
        driver.run()
        assert call.code is StatusCode.INTERNAL
        assert [len(ids) for ids in call.outputs.values()] == [3, 3, 3]
        assert other.outputs == solo(words(20, 5), 12)
        driver.assert_idle()

    def test_a_failed_prefill_starts_again_from_whole_valid_blocks(self) -> None:
        driver, prompt = Driver(max_batch_tokens=20), words(50)
        driver.runner.raises = lambda row: row.start >= 20
        assert driver.ask(prompt, 3).code is StatusCode.INTERNAL
        driver.runner.raises = lambda row: False
        retried = driver.ask(prompt, 3)
        assert retried.usage.cached_tokens == 16
        assert retried.outputs == solo(prompt, 3)

    def test_a_batch_that_fails_once_is_computed_row_by_row_and_nobody_notices(self) -> None:
        driver = Driver()
        faults = iter([True])
        driver.runner.raises = lambda row: next(faults, False)
        calls = [driver.submit(words(20, seed), 3) for seed in range(3)]
        driver.run()
        assert [call.outputs for call in calls] == [solo(words(20, seed), 3) for seed in range(3)]

    def test_a_model_that_computes_nothing_any_more_ends_the_engine(self) -> None:
        driver = Driver()
        driver.runner.raises = lambda row: True
        for seed in range(MAX_FAILED_STEPS - 1):
            assert driver.ask(words(20, seed), 3).code is StatusCode.INTERNAL
        driver.submit(words(20), 3)
        with pytest.raises(ExecutorFailedError, match=f"in {MAX_FAILED_STEPS} steps in a row"):
            driver.step()

    def test_failed_steps_with_good_ones_between_them_do_not_end_the_engine(self) -> None:
        driver = Driver()
        driver.runner.raises = poisoned
        for seed in range(2 * MAX_FAILED_STEPS):
            assert driver.ask([POISON_ID], 3).code is StatusCode.INTERNAL
            assert driver.ask(words(5, seed), 1).code is StatusCode.OK


def test_seeded_outputs_are_the_same_alone_and_in_any_company() -> None:
    sampling = [SamplingParams(8, temperature=1.3, top_k=40, top_p=0.95, seed=seed) for seed in (-(2**63), -1, 0, 5)]
    expected = [solo(words(20), sampling=params, n=2) for params in sampling]
    assert len({str(outputs) for outputs in expected}) == 4
    driver = Driver(max_batch_tokens=24)
    calls = [driver.submit(words(20), sampling=params, n=2) for params in sampling]
    calls += [driver.submit(words(31, seed), 9) for seed in range(3)]
    driver.run()
    assert [call.outputs for call in calls[:4]] == expected
