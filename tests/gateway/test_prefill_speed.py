"""Speed is learned from what was seen, and forgotten."""

import pytest

from prefixgate.gateway.prefill_speed import PrefillSpeed


def test_before_anything_was_seen_it_is_as_assumed() -> None:
    assert PrefillSpeed(1000.0, 0.0).tokens_per_second(50.0) == 1000.0


def test_what_was_seen_soon_weighs_more_than_what_was_assumed() -> None:
    speed = PrefillSpeed(1000.0, 0.0)
    for _ in range(50):
        speed.observe(500, 5.0, 0.0)
    assert speed.tokens_per_second(0.0) == pytest.approx(100.0, rel=0.05)


def test_after_a_long_silence_it_is_as_assumed_again() -> None:
    speed = PrefillSpeed(1000.0, 0.0)
    speed.observe(500, 5.0, 0.0)
    slow, later = speed.tokens_per_second(0.0), speed.tokens_per_second(60.0)
    assert slow < later < 1000.0
    assert speed.tokens_per_second(3600.0) == pytest.approx(1000.0, rel=0.001)


@pytest.mark.parametrize(("tokens", "seconds"), [(16, 1.0), (0, 1.0), (500, 0.0), (500, -1.0)])
def test_calls_that_say_nothing_of_the_speed_are_not_looked_at(tokens: int, seconds: float) -> None:
    speed = PrefillSpeed(1000.0, 0.0)
    speed.observe(tokens, seconds, 0.0)
    assert speed.tokens_per_second(0.0) == 1000.0
