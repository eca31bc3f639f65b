"""The engine on its thread: idle, woken, stopped, dead."""

import itertools
import threading
from collections.abc import Callable

import pytest
from grpc import StatusCode

from prefixgate.worker.engine_thread import ENGINE_FAILED, EngineThread
from prefixgate.worker.request import End, RefusedError
from tests.worker.driver import Driver, solo, words

HANG_SECONDS = 60.0
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


def test_the_invariants_are_checked_once_after_each_spell_of_work() -> None:
    driver = Driver()
    checks = threading.Semaphore(0)
    count = 0
    check = driver.engine.check_integrity

    def counting() -> None:
        nonlocal count
        check()
        count += 1
        checks.release()

    driver.engine.check_integrity = counting  # type: ignore[method-assign]
    thread = EngineThread(driver.engine, lambda: None, idle_seconds=0.0)
    thread.start()
    assert checks.acquire(timeout=HANG_SECONDS)
    for _ in range(20):
        # Answered by a step that computes nothing, after which the engine rests again.
        driver.engine.questions.ask("acme", lambda _: None).result(HANG_SECONDS)
    driver.submit(words(20), 5)
    assert checks.acquire(timeout=HANG_SECONDS)
    thread.stop(LAST_WORD)
    assert thread.join(HANG_SECONDS)
    assert count == 2


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
    assert [call.end for call in calls] == [ENGINE_FAILED] * 3
    with pytest.raises(RefusedError) as refused:
        driver.submit(words(20))
    assert refused.value.end.code is StatusCode.UNAVAILABLE


def failing(method: Callable[..., object], after: int, *, late: bool) -> Callable[..., object]:
    """Return a method that raises at a later call, before or after it did what it does."""
    calls = itertools.count()

    def fail(*arguments: object, **options: object) -> object:
        is_broken = next(calls) >= after
        if is_broken and not late:
            raise AssertionError("the tree has lost a node")
        result = method(*arguments, **options)
        if is_broken:
            raise AssertionError("the tree has lost a node")
        return result

    return fail


@pytest.mark.parametrize("late", [False, True], ids=["before", "amid"])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    "name", ["leader", "demand", "admit", "writable", "run_plan", "publish", "fork", "release", "stats", "expire"]
)
def test_a_fault_of_the_cache_ends_every_call_once_and_tells_the_process(name: str, after: int, late: bool) -> None:
    driver = Driver(num_blocks=40, max_running=4, max_batch_tokens=32)
    setattr(driver.cache, name, failing(getattr(driver.cache, name), after, late=late))
    calls = [driver.submit(words(20, seed), 5 + 5 * seed, n=1 + seed % 2) for seed in range(6)]
    failed = threading.Event()
    thread = EngineThread(driver.engine, failed.set)
    thread.start()
    assert failed.wait(HANG_SECONDS)
    assert thread.join(HANG_SECONDS)
    # That none ends twice, the driver checks with whatever it hears.
    assert {call.code for call in calls} <= {StatusCode.OK, StatusCode.INTERNAL}
    ended = [call.end for call in calls if call.code is StatusCode.INTERNAL]
    assert ended == [ENGINE_FAILED] * len(ended) != []
    counts = driver.observations
    assert counts.calls_received == sum(counts.calls_ended.values()) == 6
    assert sum(counts.outputs_ended.values()) == 9
    with pytest.raises(RefusedError) as refused:
        driver.submit(words(20))
    assert refused.value.end.code is StatusCode.UNAVAILABLE


def test_a_fault_of_the_cache_while_the_engine_is_stopped_leaves_no_call_without_an_end() -> None:
    driver = Driver()
    driver.cache.release = failing(driver.cache.release, 1, late=False)  # type: ignore[method-assign, assignment]
    calls = [driver.submit(words(20, seed), 900) for seed in range(4)]
    driver.step()
    failed = threading.Event()
    thread = EngineThread(driver.engine, failed.set)
    thread.stop(LAST_WORD)
    thread.start()
    assert thread.join(HANG_SECONDS)
    assert failed.is_set()
    # The first was let go of in order; at the second the cache failed, and it was told already why it ends.
    assert [call.end for call in calls] == [LAST_WORD, LAST_WORD, ENGINE_FAILED, ENGINE_FAILED]


def test_even_what_is_no_ordinary_exception_leaves_no_call_without_an_end() -> None:
    driver = Driver()

    def leave(*_: object) -> None:
        raise SystemExit(3)

    driver.runner.storage.poison = leave  # type: ignore[method-assign, assignment]
    call = driver.submit(words(20))
    failed = threading.Event()
    thread = EngineThread(driver.engine, failed.set)
    thread.start()
    assert failed.wait(HANG_SECONDS)
    assert call.end == ENGINE_FAILED


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
