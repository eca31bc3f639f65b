from collections.abc import Sequence

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.gateway.client.attempts import Attempts, RetryPolicy
from prefixgate.gateway.client.errors import GatewayError, make_error

FULL = make_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
RETRIABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}

policies = st.builds(
    lambda attempts, seconds: RetryPolicy(attempts, min(seconds), max(seconds)),
    st.integers(1, 8),
    st.tuples(st.floats(0, 60), st.floats(0, 60)),
)


def full(retry_delay: float | None = None) -> GatewayError:
    return type(FULL)(FULL.code, FULL.message, retry_delay=retry_delay)


@given(policies, st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=8, max_size=8), st.floats(0, 0.999))
def test_waits_are_bounded_and_never_shorter_than_asked(
    policy: RetryPolicy, delays: Sequence[float | None], chance: float
) -> None:
    attempts = Attempts(policy, None, chance=lambda: chance)
    waits = []
    for delay in delays:
        wait = attempts.wait_after(full(delay))
        if wait is None:
            break
        assert (delay or 0) <= wait <= policy.max_seconds
        waits.append(wait)
    assert len(waits) < policy.attempts
    if not any(delay is not None and delay > policy.max_seconds for delay in delays):
        assert len(waits) == policy.attempts - 1


def test_the_wait_doubles_up_to_its_bound() -> None:
    attempts = Attempts(RetryPolicy(6, 1.0, 5.0), None, chance=lambda: 0.0)
    assert [attempts.wait_after(full()) for _ in range(6)] == [1.0, 2.0, 4.0, 5.0, 5.0, None]
    attempts = Attempts(RetryPolicy(3, 1.0, 5.0), None, chance=lambda: 1.0)
    assert [attempts.wait_after(full()) for _ in range(3)] == [0.5, 1.0, None]


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_only_what_was_turned_away_is_tried_again(code: grpc.StatusCode) -> None:
    wait = Attempts(RetryPolicy(), None).wait_after(make_error(code, "no"))
    assert (wait is not None) == (code in RETRIABLE)


def test_no_attempt_is_made_after_the_deadline() -> None:
    now = 100.0
    attempts = Attempts(RetryPolicy(5, 1.0, 5.0), 4.0, clock=lambda: now, chance=lambda: 0.0)
    assert attempts.remaining() == 4.0
    assert attempts.wait_after(full()) == 1.0
    now = 103.0
    assert attempts.remaining() == 1.0
    assert attempts.wait_after(full()) is None
    now = 105.0
    assert attempts.remaining() == 0.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0, 1.0, 2.0), "attempts: 0 is out of range"),
        ((1, -1.0, 2.0), "first_seconds: -1.0 is out of range"),
        ((1, 3.0, 2.0), "first_seconds: 3.0 is out of range"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(values: tuple[int, float, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RetryPolicy(*values)
