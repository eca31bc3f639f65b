"""Faults are injected where they hurt; only the call concerned ends, with a status, and the others never notice."""

import time
from collections.abc import Sequence

import pytest
from grpc import StatusCode

from prefixgate.cache.copy_plan import Copy
from prefixgate.worker.executor import NON_FINITE
from prefixgate.worker.observations import Observations
from prefixgate.worker.outbox import News
from prefixgate.worker.request import Request, RequestState, SamplingParams
from prefixgate.worker.token_set import TokenSet
from tests.worker.driver import Call, Driver, solo, words
from tests.worker.tiny_models import llama_config, make_model, make_runner

PROMPTS = [[(7 * i + seed) % 90 + 3 for i in range(20 + seed)] for seed in range(4)]


def tiny_driver() -> Driver:
    runner = make_runner(make_model(llama_config()), num_blocks=32)
    return Driver(32, runner=runner, max_batch_tokens=64)


def ask_all(driver: Driver) -> list[Call]:
    return [driver.submit(prompt, sampling=SamplingParams(12, ignore_eos=True)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected() -> list[dict[int, list[int]]]:
    driver = tiny_driver()
    calls = ask_all(driver)
    driver.run()
    return [call.outputs for call in calls]


class TestNaN:
    """Not-a-number in the keys or values of one call, as a broken kernel or a bad cell of memory leaves it."""

    @pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
    @pytest.mark.parametrize("steps_before", [1, 3, 7])
    @pytest.mark.parametrize("victim", [0, 3])
    def test_ends_that_call_alone_and_nothing_of_it_is_found_again(
        self, victim: int, steps_before: int, part: int, expected: list[dict[int, list[int]]]
    ) -> None:
        driver = tiny_driver()
        calls = ask_all(driver)
        for _ in range(steps_before):
            driver.step()
        (sequence,) = calls[victim].request.live
        assert sequence.table is not None
        # Its newest slot: in a block that nobody else can have.
        block, slot = divmod(sequence.num_computed - 1, 16)
        driver.runner.storage.data[sequence.table.block_ids[block], 1, part, slot] = float("nan")
        driver.run()
        assert calls[victim].code is StatusCode.INTERNAL
        assert calls[victim].end == NON_FINITE
        for index, call in enumerate(calls):
            if index != victim:
                assert (call.code, call.outputs) == (StatusCode.OK, expected[index])
        driver.assert_idle()
        again = driver.ask(PROMPTS[victim], sampling=SamplingParams(12, ignore_eos=True))
        assert again.code is StatusCode.OK
        assert again.outputs == expected[victim]


class TestSampling:
    def test_a_row_that_cannot_be_sampled_ends_its_call_alone(self) -> None:
        driver = Driver()
        nothing_left = SamplingParams(9, allowed_ids=TokenSet.of([65]), banned_ids=TokenSet.of([65]))
        calls = [driver.submit(words(20, seed), 9) for seed in range(3)]
        bad = driver.submit(words(20, 7), sampling=nothing_left)
        driver.run()
        assert (bad.code, bad.outputs) == (StatusCode.INTERNAL, {})
        assert [call.outputs for call in calls] == [solo(words(20, seed), 9) for seed in range(3)]
        driver.assert_idle()


class TestReceivers:
    class Gone:
        """The receiver of a stream whose event loop has closed."""

        def __init__(self) -> None:
            self.called = 0

        def deliver(self, step: int, news: Sequence[News]) -> None:
            self.called += 1
            raise RuntimeError("Event loop is closed")

    def test_a_call_whose_receiver_is_gone_ends_and_computes_nothing_more(self) -> None:
        driver, gone = Driver(), self.Gone()
        heard = [driver.submit(words(20, seed), 30) for seed in range(3)]
        lost = driver.submit(words(20, 7), 1000)
        waiting = driver.submit(words(20, 8), 1000)
        for call in (lost, waiting):
            call.request.sink = gone
        driver.step()
        assert lost.request.state is waiting.request.state is RequestState.ENDED
        assert driver.engine.report().running_calls == 3
        driver.run()
        assert gone.called == 2, "once with news, once with the end"
        assert driver.observations.calls_ended["cancelled"] == 2
        assert [call.outputs for call in heard] == [solo(words(20, seed), 30) for seed in range(3)]
        driver.assert_idle()


class TestMetrics:
    @pytest.mark.parametrize(
        "name",
        [
            name
            for name in vars(Observations)
            if not name.startswith("_") and name not in ("labels", "queried_tokens", "hit_tokens")
        ],
    )
    def test_a_metric_that_raises_is_dropped_and_counted(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = Driver(num_blocks=15, max_running=4)

        def fail(*_: object) -> None:
            raise ValueError("Counters can only be incremented by non-negative amounts.")

        monkeypatch.setattr(driver.observations, name, fail)
        calls = [driver.submit(words(40, seed), 90) for seed in range(4)]
        driver.run()
        assert [call.outputs for call in calls] == [solo(words(40, seed), 90) for seed in range(4)]
        if name != "call_refused":
            assert driver.engine.report().metrics_errors > 0
        driver.assert_idle()


class TestCopies:
    def test_a_copy_that_takes_its_time_changes_nothing_even_if_its_call_leaves_meanwhile(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver = Driver()
        copy_blocks, leaving = driver.runner.storage.copy_blocks, list[Request]()

        def slow(copies: Sequence[Copy]) -> None:
            time.sleep(0.05)
            for request in leaving:
                driver.engine.cancel(request)
            copy_blocks(copies)

        monkeypatch.setattr(driver.runner.storage, "copy_blocks", slow)
        sampling = SamplingParams(9, temperature=1.0, seed=4)
        stays = driver.submit(words(20), n=3, sampling=sampling)
        leaves = driver.submit(words(20, 5), n=3, sampling=sampling)
        leaving.append(leaves.request)
        driver.run()
        assert leaves.code is StatusCode.CANCELLED
        assert stays.usage.copied_blocks == 2
        assert stays.outputs == solo(words(20), n=3, sampling=sampling)
        driver.assert_idle()
        leaving.clear()
        for prompt in (words(20), words(20, 5), [*words(20, 5), 40, 41]):
            assert driver.ask(prompt, 5).outputs == solo(prompt, 5)
