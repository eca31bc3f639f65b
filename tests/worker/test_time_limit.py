"""Time limits: what is there is the answer, whatever the call was doing."""

from grpc import StatusCode

from prefixgate.worker.sequence import FinishReason
from tests.worker.driver import Driver, solo, words

TIME_LIMIT = FinishReason.TIME_LIMIT


def test_outputs_end_with_what_they_hold_and_the_call_well() -> None:
    driver = Driver()
    other = driver.submit(words(20, 3), 12)
    call = driver.submit(words(20), 50, n=2, time_limit_seconds=5.0)
    for _ in range(4):
        driver.step()
    driver.now += 5.0
    driver.run()
    assert call.code is StatusCode.OK
    assert call.finished == {0: TIME_LIMIT, 1: TIME_LIMIT}
    expected = solo(words(20), 50, n=2)
    assert call.outputs == {index: token_ids[:4] for index, token_ids in expected.items()}
    assert call.usage.completion_tokens == 8
    assert other.outputs == solo(words(20, 3), 12)
    assert driver.observations.outputs_ended["time_limit"] == 2
    # What was computed stays cached: asking again for longer goes on from there.
    again = driver.ask([*words(20), *call.outputs[0]], 4)
    assert again.usage.cached_tokens == 23
    driver.assert_idle()


def test_a_call_that_waits_ends_with_nothing_and_one_amid_its_prompt_too() -> None:
    driver = Driver(max_batch_tokens=16, max_running=1)
    prefilling = driver.submit(words(60), 5, time_limit_seconds=5.0)
    waiting = driver.submit(words(20, 2), 5, time_limit_seconds=6.0)
    after = driver.submit(words(20, 4), 5)
    driver.step()
    driver.now += 6.0
    driver.run()
    for call in (prefilling, waiting):
        assert (call.code, call.finished, call.outputs) == (StatusCode.OK, {0: TIME_LIMIT}, {})
        assert call.usage.completion_tokens == 0
    assert after.outputs == solo(words(20, 4), 5)
    driver.assert_idle()


def test_an_output_that_ended_before_keeps_its_reason() -> None:
    driver = Driver()
    call = driver.submit(words(20), 50, n=2, time_limit_seconds=5.0)
    driver.step()
    driver.engine.cancel(call.request, 1)
    driver.step()
    driver.now += 5.0
    driver.run()
    assert call.finished == {0: TIME_LIMIT, 1: FinishReason.STOP}
    driver.assert_idle()


def test_the_limit_of_an_ended_call_comes_to_nothing_and_a_deadline_that_comes_first_fails_it() -> None:
    driver = Driver()
    ended = driver.submit(words(20), 1, time_limit_seconds=5.0)
    late = driver.submit(words(20, 3), 50, deadline_seconds=2.0, time_limit_seconds=5.0)
    driver.step()
    driver.now += 2.0
    driver.run()
    assert (ended.finished, late.code) == ({0: FinishReason.LENGTH}, StatusCode.DEADLINE_EXCEEDED)
    driver.now += 5.0
    driver.step()
    assert ended.finished == {0: FinishReason.LENGTH}
    driver.assert_idle()
