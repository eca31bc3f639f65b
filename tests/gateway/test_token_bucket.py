from hypothesis import given
from hypothesis import strategies as st

from prefixgate.gateway.token_bucket import TokenBucket


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_minutes_worth_at_once_and_then_as_it_fills() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert (bucket.capacity, bucket.seconds_until(60)) == (60, 0)
    bucket.take(60)
    assert bucket.seconds_until(1) == 1
    assert bucket.seconds_until(60) == 60
    clock.now += 30
    assert (bucket.level, bucket.seconds_until(31)) == (30, 1)
    clock.now += 3600
    assert bucket.level == 60


def test_what_is_overdrawn_is_waited_for_and_what_is_put_back_never_overfills() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(150)
    assert (bucket.level, bucket.seconds_until(0)) == (-90, 90)
    bucket.take(-1000)
    assert bucket.level == 60


def test_another_size_keeps_what_was_used() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(20)
    bucket.resize(100)
    assert (bucket.capacity, bucket.level) == (100, 80)
    bucket.resize(10)
    assert bucket.level == -10
    clock.now += 60
    assert bucket.level == 0


def test_who_is_allowed_less_pays_off_a_minutes_worth_at_most() -> None:
    clock = Clock()
    bucket = TokenBucket(1_000_000, clock)
    bucket.take(900_000)
    bucket.resize(10)
    assert bucket.level == -10
    clock.now += 60
    assert bucket.level == 0
    bucket.resize(1_000_000)
    assert bucket.seconds_until(999_990) == 0.0


@given(
    per_minute=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 200)), max_size=50),
)
def test_no_more_is_taken_than_a_minutes_worth_and_what_filled_since(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    clock = Clock()
    bucket, taken = TokenBucket(per_minute, clock), 0
    for seconds, amount in steps:
        clock.now += seconds
        wait = bucket.seconds_until(min(amount, per_minute))
        if amount <= per_minute and not wait:
            bucket.take(amount)
            taken += amount
        elif amount <= per_minute:
            # Whoever comes back when told to is let in.
            clock.now += wait * (1 + 1e-9) + 1e-9
            assert bucket.seconds_until(amount) < 1e-6
    assert taken <= per_minute * (1 + (clock.now - 1000) / 60) * (1 + 1e-9)
