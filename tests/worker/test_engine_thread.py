"""The engine on its thread: idle, woken, stopped, dead."""

import threading

import pytest
from grpc import StatusCode

from prefixgate.worker.engine_thread import EngineThread
from prefixgate.worker.request import End, RefusedError
from tests.worker.driver import Driver, solo, words

HANG_SECONDS = 30.0
LAST_WORD = End(StatusCode.UNAVAILABLE, "the worker is shutting down")


def test_an_engine_that_idled_from_the_start_serves_the_first_call() -> None:
    driver = Driver()
    checked = threading.Event()
    check = driver.cache.check_integrity

    def checking() -> None:
        check()
        checked.set()

    driver.cache.check_integrity = checking  # type: ignore[method-assign]
    thread = EngineThread(driver.engine, lambda: None, idle_seconds=0.0)
    thread.start()
    assert checked.wait(HANG_SECONDS), "the invariants are checked when there is nothing to do"
    call = driver.submit(words(20), 5)
    while call.end is None:
        assert driver.engine.wait_until_idle(HANG_SECONDS)
    assert call.outputs == solo(words(20), 5)
    thread.stop(LAST_WORD)
    assert thread.join(HANG_SECONDS)


def test_stopping_ends_live_calls_with_the_last_word_and_takes_no_more() -> None:
    driver = Driver(max_running=1)
    thread = EngineThread(driver.engine, lambda: None)
    calls = [driver.submit(words(20, seed), 900) for seed in range(3)]
    thread.start()
    thread.stop(LAST_WORD)
    assert thread.join(HANG_SECONDS)
    assert [call.end for call in calls] == [LAST_WORD] * 3
    driver.assert_idle()
    with pytest.raises(RefusedError):
        driver.submit(words(20))


def test_a_fault_of_the_loop_ends_every_call_and_tells_the_process() -> None:
    driver = Driver(max_running=1)

    def broken(*_: object) -> None:
        raise RuntimeError("the device fell off the bus")

    driver.runner.storage.poison = broken  # type: ignore[method-assign, assignment]
    calls = [driver.submit(words(20, seed), 900) for seed in range(3)]
    failed = threading.Event()
    thread = EngineThread(driver.engine, failed.set)
    thread.start()
    assert failed.wait(HANG_SECONDS)
    assert thread.join(HANG_SECONDS)
    assert [call.end for call in calls] == [End(StatusCode.INTERNAL, "the worker's engine failed")] * 3
    with pytest.raises(RefusedError) as refused:
        driver.submit(words(20))
    assert refused.value.end.code is StatusCode.UNAVAILABLE


def test_a_call_that_comes_while_the_engine_dies_is_ended_or_refused() -> None:
    driver = Driver()
    submitted, late = threading.Event(), []

    def broken(*_: object) -> None:
        late.append(driver.submit(words(20, 2)))
        submitted.set()
        raise RuntimeError("the device fell off the bus")

    driver.runner.storage.poison = broken  # type: ignore[method-assign, assignment]
    driver.submit(words(20))
    thread = EngineThread(driver.engine, lambda: None)
    thread.start()
    assert submitted.wait(HANG_SECONDS)
    assert thread.join(HANG_SECONDS)
    assert late[0].code is StatusCode.INTERNAL
