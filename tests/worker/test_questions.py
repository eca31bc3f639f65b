"""Work on the cache that other threads ask for: in turns, a few before each step, and always answered."""

from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from grpc import StatusCode

from prefixgate.worker.cache_control import CacheControl
from prefixgate.worker.engine_thread import EngineThread
from prefixgate.worker.inbox import MAX_QUESTIONS
from prefixgate.worker.questions import MAX_ANSWERS, MAX_SECONDS
from prefixgate.worker.request import End, RefusedError
from tests.worker.driver import Driver, words

HANG_SECONDS = 60.0
LAST_WORD = End(StatusCode.UNAVAILABLE, "the worker is shutting down")


def ask(driver: Driver, done: list[int], number: int = 0, tenant: str = "acme") -> "Future[Any]":
    return driver.engine.questions.ask(tenant, lambda _: done.append(number))


def test_a_few_are_answered_before_each_step_in_order_of_arrival() -> None:
    driver, done = Driver(), list[int]()
    for number in range(2 * MAX_ANSWERS + 1):
        ask(driver, done, number, tenant=("acme", "bolt")[number % 2])
    for answered in (MAX_ANSWERS, 2 * MAX_ANSWERS, 2 * MAX_ANSWERS + 1):
        # The inbox keeps the thread from resting while questions are left.
        assert driver.engine.inbox.wait(timeout=0)
        driver.step()
        assert done == list(range(answered))
    assert not driver.engine.inbox.wait(timeout=0)


def test_tenants_are_answered_in_turns() -> None:
    driver, done = Driver(), list[int]()
    for number in range(MAX_QUESTIONS):
        ask(driver, done, number)
    for number in range(100, 103):
        ask(driver, done, number, tenant="bolt")
    driver.step()
    assert done == [0, 100, 1, 101, 2, 102, 3, 4]


def test_what_takes_long_is_not_followed_by_more_before_the_next_step() -> None:
    driver, done = Driver(), list[int]()

    def think(_: CacheControl) -> None:
        driver.now += 2 * MAX_SECONDS
        done.append(len(done))

    for _ in range(3):
        driver.engine.questions.ask("acme", think)
    for answered in range(1, 4):
        driver.step()
        assert done == list(range(answered))


def test_who_asks_too_much_is_refused_and_nobody_else_is() -> None:
    driver, done = Driver(), list[int]()
    for _ in range(MAX_QUESTIONS):
        ask(driver, done)
    with pytest.raises(RefusedError, match=f"^{MAX_QUESTIONS} cache control calls of the tenant wait") as refused:
        ask(driver, done)
    assert refused.value.end.code is StatusCode.RESOURCE_EXHAUSTED
    ask(driver, done, tenant="bolt")
    driver.step()
    ask(driver, done)


def test_a_question_that_is_taken_back_is_not_followed() -> None:
    driver, done = Driver(), list[int]()
    first, second = ask(driver, done, 1), ask(driver, done, 2)
    assert first.cancel()
    driver.step()
    assert done == [2]
    assert second.done()
    with pytest.raises(CancelledError):
        first.result(timeout=0)


def test_work_that_fails_fails_for_who_asked_and_for_no_call() -> None:
    driver = Driver()
    call = driver.submit(words(20), 5)

    def broken(_: object) -> None:
        raise RuntimeError("secret of the cache")

    answer = driver.engine.questions.ask("acme", broken)
    driver.run()
    with pytest.raises(RuntimeError):
        answer.result(timeout=0)
    assert call.code is StatusCode.OK


def test_what_is_left_when_the_engine_ends_is_refused_and_nothing_comes_after() -> None:
    driver, done = Driver(), list[int]()
    answers = [ask(driver, done) for _ in range(MAX_QUESTIONS)]
    assert answers[0].cancel()
    thread = EngineThread(driver.engine, lambda: None)
    # Stopped before its first step, so that none was answered.
    thread.stop(LAST_WORD)
    thread.start()
    assert thread.join(HANG_SECONDS)
    for answer in answers[1:]:
        with pytest.raises(RefusedError) as refused:
            answer.result(timeout=0)
        assert refused.value.end == LAST_WORD
    assert done == []
    with pytest.raises(RefusedError) as late:
        ask(driver, done)
    assert late.value.end.code is StatusCode.UNAVAILABLE


def test_an_engine_that_fails_refuses_what_is_left() -> None:
    driver, done = Driver(), list[int]()

    def broken(*_: object) -> None:
        ask(driver, done)
        raise RuntimeError("the device fell off the bus")

    driver.runner.storage.poison = broken  # type: ignore[method-assign, assignment]
    driver.submit(words(20))
    answers = [ask(driver, done) for _ in range(MAX_ANSWERS + 1)]
    thread = EngineThread(driver.engine, lambda: None)
    thread.start()
    assert thread.join(HANG_SECONDS)
    assert len(done) == MAX_ANSWERS
    with pytest.raises(RefusedError) as refused:
        answers[-1].result(timeout=0)
    assert refused.value.end.code is StatusCode.INTERNAL
    assert driver.engine.inbox.take_question() is None


def test_an_engine_at_rest_answers() -> None:
    driver, done = Driver(), list[int]()
    thread = EngineThread(driver.engine, lambda: None, idle_seconds=0.0)
    thread.start()
    for number in range(3):
        ask(driver, done, number).result(HANG_SECONDS)
    assert done == [0, 1, 2]
    thread.stop(LAST_WORD)
    assert thread.join(HANG_SECONDS)
