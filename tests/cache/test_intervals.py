"""What waits are worth, from what was seen of them."""

from itertools import pairwise

import pytest

from prefixgate.cache.intervals import NUM_BINS, ReuseIntervals, bin_of


def observe(intervals: ReuseIntervals, interval: int, ticks: int = 5000, *, returning: int = 1) -> None:
    """At each tick content of pace 0 is used; of so many, one is used again after the interval."""
    for tick in range(ticks):
        if tick >= interval and tick % returning == 0:
            intervals.renew(0, interval)
        intervals.begin()
        intervals.tick()


def test_bins_are_one_use_wide_at_first_and_quarters_of_an_octave_later() -> None:
    assert [bin_of(wait) for wait in (1, 2, 7, 8, 9, 10, 15, 16, 19, 20)] == [1, 2, 7, 8, 8, 9, 11, 12, 12, 13]
    assert bin_of(1 << 40) == NUM_BINS - 1


def test_before_anything_was_seen_the_older_is_never_worth_more() -> None:
    for worth in ReuseIntervals().worth:
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(worth))
        assert worth[1] > worth[20] > worth[40]


def test_what_returns_after_a_known_time_is_worth_most_just_before_it_and_little_after() -> None:
    intervals = ReuseIntervals()
    observe(intervals, 100)
    worth = intervals.worth[0]
    fresh, near, late = (worth[bin_of(age)] for age in (4, 96, 200))
    assert near > 3 * fresh
    assert fresh > late


def test_worth_is_uses_per_tick() -> None:
    intervals = ReuseIntervals()
    observe(intervals, 100)
    # All return after about 100 ticks (a bin ends at 112): one use for each hundred ticks kept.
    assert 1 / 120 < intervals.worth[0][bin_of(1)] < 1 / 90


def test_what_mostly_never_returns_is_worth_less_in_proportion() -> None:
    faithful, fickle = ReuseIntervals(), ReuseIntervals()
    observe(faithful, 100)
    observe(fickle, 100, returning=10)
    ratio = faithful.worth[0][bin_of(1)] / fickle.worth[0][bin_of(1)]
    assert 7 < ratio < 13


def test_a_pace_without_waits_of_its_own_goes_by_what_holds_for_all() -> None:
    intervals = ReuseIntervals()
    observe(intervals, 100)
    assert intervals.worth[7][bin_of(96)] > 3 * intervals.worth[7][bin_of(200)]


def test_a_pace_is_the_octave_and_a_half_of_the_last_interval() -> None:
    intervals = ReuseIntervals()
    ends = (1, 2, 7, 8, 23, 24, 63, 64, 191, 192, 511, 512, 100_000)
    assert [intervals.renew(0, interval) for interval in ends] == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]


def test_ages_that_nothing_can_have_reached_yet_are_not_taken_for_hopeless() -> None:
    intervals = ReuseIntervals()
    observe(intervals, 400, 320)  # nothing has come back, and nothing could have
    before = ReuseIntervals().worth[0]
    assert intervals.worth[0][bin_of(512)] == pytest.approx(before[bin_of(512)])
    assert intervals.worth[0][bin_of(64)] < before[bin_of(64)]


def test_a_change_of_traffic_replaces_what_was_seen() -> None:
    intervals = ReuseIntervals()
    observe(intervals, 100)
    observe(intervals, 10)
    worth = intervals.worth[0]
    assert worth[bin_of(9)] > 3 * worth[bin_of(96)]
