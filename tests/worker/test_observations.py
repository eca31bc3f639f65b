"""Observations in buckets."""

from hypothesis import given
from hypothesis import strategies as st

from prefixgate.proto.exposition import Histogram
from prefixgate.worker.observations import FIRST_TOKEN_BUCKETS, GAP_BUCKETS


@given(st.lists(st.floats(0, 1e4)))
def test_a_bucket_counts_what_is_not_above_its_bound(values: list[float]) -> None:
    histogram = Histogram((0.1, 1.0, 10.0))
    for value in values:
        histogram.observe(value)
    buckets, total = histogram.cumulative()
    assert buckets == [
        *((str(bound), float(sum(value <= bound for value in values))) for bound in (0.1, 1.0, 10.0)),
        ("+Inf", float(len(values))),
    ]
    assert total == sum(values)


def test_bounds_rise() -> None:
    for bounds in (FIRST_TOKEN_BUCKETS, GAP_BUCKETS):
        assert list(bounds) == sorted(set(bounds))
