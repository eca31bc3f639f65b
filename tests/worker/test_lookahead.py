"""Steps launched behind steps that have not landed: when, and that nobody can tell."""

from collections.abc import Sequence

import pytest
import torch
from grpc import StatusCode

from prefixgate.worker.lookahead import MAX_AHEAD_OF_WAITING
from prefixgate.worker.model_runner import Row
from prefixgate.worker.request import End, SamplingParams
from prefixgate.worker.sequence import FinishReason
from prefixgate.worker.token_set import TokenSet
from prefixgate.worker.witness_options import WitnessOptions
from tests.worker.driver import Driver, solo, words


def ahead_driver(num_blocks: int = 64, **options: object) -> Driver:
    return Driver(num_blocks, is_ahead=True, **options)  # type: ignore[arg-type]


def test_each_decode_step_is_launched_before_the_one_before_it_has_landed() -> None:
    driver = ahead_driver()
    calls = [driver.submit(words(20, seed), 30) for seed in range(3)]
    driver.step()
    assert [len(call.outputs[0]) for call in calls] == [1, 1, 1]
    assert len(driver.runner.steps) == 1, "the prompts' step lands first: nobody knows yet what comes next"
    driver.step()
    assert [len(call.outputs[0]) for call in calls] == [2, 2, 2]
    assert len(driver.runner.steps) == 3
    driver.run()
    assert [call.outputs for call in calls] == [solo(words(20, seed), 30) for seed in range(3)]
    assert driver.runner.steps_ahead == list(range(2, 30))
    assert len(driver.runner.steps) == 30, "no token was computed for nobody: all ends were known"
    driver.assert_idle()


def test_outputs_that_end_by_length_are_left_out_of_the_next_step() -> None:
    driver = ahead_driver()
    calls = [driver.submit(words(20, seed), count) for seed, count in enumerate((3, 9, 30))]
    driver.run()
    assert [len(step) for step in driver.runner.steps] == [3] * 3 + [2] * 6 + [1] * 21
    assert [call.outputs for call in calls] == [solo(words(20, i), count) for i, count in enumerate((3, 9, 30))]


def test_an_output_that_ends_by_its_own_token_computes_one_for_nobody() -> None:
    options = WitnessOptions(context=256, eos_every=9)
    driver = ahead_driver(options=options)
    calls = [driver.submit(words(20, seed), 100) for seed in range(4)]
    driver.run()
    expected = [solo(words(20, seed), 100, options=options) for seed in range(4)]
    assert [call.outputs for call in calls] == expected
    lengths = {len(outputs[0]) for outputs in expected}
    assert len(lengths) > 1
    in_vain = sum(1 for outputs in expected if len(outputs[0]) > 1)
    computed = sum(driver.runner.tokens_per_step) - in_vain
    assert driver.engine.report().computed_tokens == computed == sum(19 + len(outputs[0]) for outputs in expected)
    # With the others still in flight, the next step is launched behind the one that has the dead row in it.
    assert len(driver.runner.steps_ahead) == max(lengths) - 1
    driver.assert_idle()


def test_nobody_waits_for_a_step_that_is_for_nobody() -> None:
    options = WitnessOptions(context=256, eos_every=9)
    plain, ahead = (Driver(max_running=1, options=options, is_ahead=is_ahead) for is_ahead in (False, True))
    for driver in (plain, ahead):
        for seed in range(4):
            driver.submit(words(20, seed), 100)
        driver.run()
    assert len(ahead.runner.steps) > len(plain.runner.steps), "each output that ended early computed one in vain"
    assert ahead.engine.report().steps == plain.engine.report().steps
    ahead.assert_idle()


def test_what_was_computed_for_nobody_is_not_found_by_the_next_turn() -> None:
    options = WitnessOptions(context=256, eos_every=9)
    driver = ahead_driver(num_blocks=12, options=options)
    first = driver.ask(words(20), 100)
    spoken = first.outputs[0]
    for more in ([33], words(17, 9)):
        prompt = [*words(20), *spoken, *more]
        again = driver.ask(prompt, 5)
        assert again.usage.cached_tokens >= 20 + len(spoken) - 1
        assert again.outputs == solo(prompt, 5, options=options)


@pytest.mark.parametrize("at", [2, 14, 15, 16])
def test_a_cancel_lands_what_runs_and_ends_the_call(at: int) -> None:
    driver = ahead_driver()
    call, other = driver.submit(words(20), 60), driver.submit(words(20, 5), 40)
    for _ in range(at):
        driver.step()
    driver.engine.cancel(call.request)
    driver.step()
    assert call.end is None, "its token was on the way"
    driver.step()
    assert call.code is StatusCode.CANCELLED
    assert call.outputs[0] == solo(words(20), 60)[0][: at + 1]
    driver.run()
    assert other.outputs == solo(words(20, 5), 40)
    assert driver.ask(words(20), 60).outputs == solo(words(20), 60)
    driver.assert_idle()


def test_a_call_that_comes_is_taken_in_by_the_step_after_the_one_that_runs() -> None:
    driver = ahead_driver()
    first = driver.submit(words(20), 30)
    for _ in range(5):
        driver.step()
    late = driver.submit(words(33, 7), 5)
    driver.step()
    driver.step()
    assert late.outputs[0] != []
    driver.run()
    assert (first.outputs, late.outputs) == (solo(words(20), 30), solo(words(33, 7), 5))


def test_a_call_that_comes_while_the_last_step_runs_is_left_to_work_on() -> None:
    driver = ahead_driver()
    driver.submit(words(20), 4)
    for _ in range(3):
        driver.step()
    call = driver.submit(words(20, 5), 4)
    assert driver.step(), "the step that ends the first call takes in no other"
    driver.run()
    assert call.outputs == solo(words(20, 5), 4)


def test_with_no_room_for_who_waits_the_steps_go_on_ahead() -> None:
    driver = ahead_driver(max_running=2)
    calls = [driver.submit(words(20, seed), 20) for seed in range(4)]
    driver.run()
    assert [call.outputs for call in calls] == [solo(words(20, seed), 20) for seed in range(4)]
    assert len(driver.runner.steps_ahead) == 36


def test_a_full_batch_makes_way_ahead_for_who_was_served_less() -> None:
    def steps_to_end(driver: Driver, prompt: list[int]) -> int:
        call = driver.submit(prompt, 2, tenant="bolt")
        steps = 0
        while call.end is None:
            driver.step()
            steps += 1
        return steps

    def steps_to_second_call(driver: Driver) -> int:
        driver.submit(words(20, 1), 10, tenant="bolt")
        driver.step()
        for seed in (2, 3):
            driver.submit(words(20, seed), 400)
        steps_to_end(driver, words(300, 5))
        # It comes back with more work behind it than acme has, whose two calls fill the batch for a while yet.
        return steps_to_end(driver, words(20, 7))

    plain, ahead = (Driver(100, max_running=2, is_ahead=is_ahead) for is_ahead in (False, True))
    needed = steps_to_second_call(plain)
    assert 50 < needed < 300
    assert plain.observations.preemptions == 1
    assert steps_to_second_call(ahead) <= needed + MAX_AHEAD_OF_WAITING + 2
    assert ahead.observations.preemptions == 1
    assert len(ahead.runner.steps_ahead) > needed // 2


def test_a_deadline_and_a_time_limit_are_kept() -> None:
    driver = ahead_driver()
    dead = driver.submit(words(20), 100, deadline_seconds=5.0)
    cut = driver.submit(words(20, 5), 100, time_limit_seconds=5.0)
    for _ in range(4):
        driver.step()
    driver.now += 5.0
    driver.run()
    assert dead.code is StatusCode.DEADLINE_EXCEEDED
    assert cut.code is StatusCode.OK
    assert cut.finished == {0: FinishReason.TIME_LIMIT}
    assert cut.outputs[0] == solo(words(20, 5), 100)[0][: len(cut.outputs[0])]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(20, temperature=1.0, seed=3, top_k=30, top_p=0.9),
        SamplingParams(20, temperature=1.0, min_tokens=10, min_p=0.01),
        SamplingParams(20, logit_bias=((70, 5.0),), banned_ids=TokenSet.of([71])),
        SamplingParams(20, logprobs=3),
    ],
)
def test_what_a_call_asks_of_its_tokens_is_kept_ahead(sampling: SamplingParams) -> None:
    driver, reference = ahead_driver(), Driver()
    calls = [d.ask(words(20), sampling=sampling, n=2) for d in (driver, reference)]
    assert calls[0].outputs == calls[1].outputs
    assert calls[0].logprobs == calls[1].logprobs
    assert len(driver.runner.steps_ahead) == 18


def test_penalties_wait_for_the_token_that_they_weigh() -> None:
    sampling = SamplingParams(20, repetition_penalty=1.5, frequency_penalty=1.0)
    driver = ahead_driver()
    calls = [driver.submit(words(20), sampling=sampling), driver.submit(words(20, 5), 40)]
    driver.run()
    assert [call.outputs for call in calls] == [solo(words(20), sampling=sampling), solo(words(20, 5), 40)]
    assert driver.runner.steps_ahead[0] >= 20


def test_running_out_of_blocks_lands_what_runs_and_preempts_then() -> None:
    driver = ahead_driver(num_blocks=7)
    calls = [driver.submit(words(20, seed), 40) for seed in range(3)]
    driver.run()
    assert [call.outputs for call in calls] == [solo(words(20, seed), 40) for seed in range(3)]
    assert driver.observations.preemptions > 0
    assert driver.runner.steps_ahead
    driver.assert_idle()


def test_outputs_that_share_a_tail_copy_it_ahead_as_well() -> None:
    sampling = SamplingParams(40, temperature=1.0, seed=1)
    driver = ahead_driver()
    call = driver.ask(words(20), sampling=sampling, n=4)
    assert call.outputs == solo(words(20), sampling=sampling, n=4)
    assert call.usage.copied_blocks == solo_copies(sampling)
    driver.assert_idle()


def solo_copies(sampling: SamplingParams) -> int:
    return Driver().ask(words(20), sampling=sampling, n=4).usage.copied_blocks


def test_a_row_that_is_not_finite_ahead_ends_its_call_alone() -> None:
    driver = ahead_driver()
    driver.runner.spoils = lambda row: row.start == 30 and row.scope.tenant == "bolt"
    bad, good = driver.submit(words(20), 40, tenant="bolt"), driver.submit(words(20, 5), 40)
    driver.run()
    assert bad.code is StatusCode.INTERNAL
    assert len(bad.outputs[0]) == 11
    assert good.outputs == solo(words(20, 5), 40)
    driver.assert_idle()
    driver.runner.spoils = lambda row: False
    assert driver.ask(words(20), 40, tenant="bolt").outputs == solo(words(20), 40, tenant="bolt")


def test_a_row_that_is_left_no_token_ends_its_call_alone() -> None:
    driver = ahead_driver()
    nothing = SamplingParams(5, allowed_ids=TokenSet.of([65]), banned_ids=TokenSet.of([65]))
    good, bad = driver.submit(words(20), 5), driver.submit(words(20, 3), sampling=nothing, n=2)
    driver.run()
    assert (bad.code, bad.outputs) == (StatusCode.INTERNAL, {})
    assert good.outputs == solo(words(20), 5)


def test_a_launch_that_fails_ahead_is_made_again_when_the_step_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = ahead_driver()
    launch, faults = driver.runner.forward_ahead, iter([False, True, False, True])

    def failing(rows: Sequence[Row], token_ids: torch.Tensor) -> torch.Tensor:
        if next(faults, False):
            raise RuntimeError("out of something")
        return launch(rows, token_ids)

    monkeypatch.setattr(driver.runner, "forward_ahead", failing)
    calls = [driver.submit(words(20, seed), 30) for seed in range(3)]
    driver.run()
    assert [call.outputs for call in calls] == [solo(words(20, seed), 30) for seed in range(3)]
    driver.assert_idle()


def test_an_engine_that_is_told_to_end_lands_what_runs() -> None:
    driver = ahead_driver()
    call = driver.submit(words(20), 60)
    for _ in range(5):
        driver.step()
    driver.engine.end_all(End(StatusCode.UNAVAILABLE, "the worker is shutting down"))
    assert call.code is StatusCode.UNAVAILABLE
    assert call.outputs[0] == solo(words(20), 60)[0][:6]
    driver.assert_idle()


def test_a_copy_of_logits_that_are_not_there_names_a_token_all_the_same() -> None:
    # What the device makes up of a line that is not finite is looked up by the step behind it.
    driver = ahead_driver()
    driver.runner.spoils = lambda row: row.start == 25
    looked_up: list[int] = []
    launch = driver.runner.forward_ahead

    def watching(rows: Sequence[Row], token_ids: torch.Tensor) -> torch.Tensor:
        looked_up.extend(token_ids.tolist())
        return launch(rows, token_ids)

    driver.runner.forward_ahead = watching  # type: ignore[method-assign]
    assert driver.ask(words(20), 40).code is StatusCode.INTERNAL
    assert looked_up
    assert all(0 <= token < driver.runner.spec.vocabulary_size for token in looked_up)
