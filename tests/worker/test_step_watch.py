"""Which steps are held to hang, on a loop whose turns the test makes."""

import asyncio
from collections.abc import Iterable

from prefixgate.worker.step_watch import StepWatch


def beats_until_stuck(steps: Iterable[int | None], most_seconds: float) -> int | None:
    """Tell at which beat a step was given up, where each beat sees one of these; None where none was."""
    left = iter(steps)
    beats = 0

    async def sleep(_: float) -> None:
        nonlocal beats
        beats += 1

    def current_step() -> int | None:
        try:
            return next(left)
        except StopIteration:
            raise AssertionError("looked at more steps than there were") from None

    try:
        asyncio.run(StepWatch(current_step, most_seconds, sleep=sleep).until_stuck())
    except AssertionError:
        return None
    return beats


def test_a_step_that_lasts_is_given_up_after_its_time_and_not_before() -> None:
    # Seen once it has begun, and then three times more: it has run for at least three seconds.
    assert beats_until_stuck([7, 7, 7, 7, 7, 7], 2) == 4
    assert beats_until_stuck([7, 7, 7], 2) is None
    assert beats_until_stuck([7, 7, 7, 7, 7, 7], 1.5) == 4


def test_many_short_steps_are_no_long_one() -> None:
    assert beats_until_stuck(range(1000), 2) is None
    assert beats_until_stuck([1, 1, 1, 2, 2, 2, 3, 3, 3], 2) is None


def test_no_step_is_none_that_hangs() -> None:
    assert beats_until_stuck([None] * 1000, 2) is None
    assert beats_until_stuck([1, 1, 1, None, 2, 2, 2, None], 2) is None


def test_without_a_bound_a_step_may_take_any_time() -> None:
    assert beats_until_stuck([7] * 1000, 0) is None
