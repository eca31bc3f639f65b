"""The text format, read back by Prometheus's own parser."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.parser import text_string_to_metric_families

from prefixgate.proto.exposition import Family, Histogram, Kind, write_page

NUMBERS = st.one_of(st.floats(allow_nan=False), st.integers(-(2**53), 2**53))
# As the configuration and the code give them: any text, but no lone surrogates, which no file holds.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"))


def read(page: bytes) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


@given(st.dictionaries(st.tuples(TEXTS, TEXTS), NUMBERS, max_size=5), TEXTS)
def test_what_is_written_is_what_is_read(samples: dict[tuple[str, ...], float], text: str) -> None:
    page = write_page([Family("things", "gauge", text, ("a", "b"), samples)])
    assert list(read(page)) == [
        ("things", {"a": first, "b": second}, float(value)) for (first, second), value in samples.items()
    ]


@pytest.mark.parametrize("value", [math.inf, -math.inf, 0, -0.0, 1e300, 5e-324])
def test_numbers_are_written_as_prometheus_reads_them(value: float) -> None:
    ((_, _, got),) = read(write_page([Family("x", "gauge", "X.", (), {(): value})]))
    assert got == value


def test_a_number_that_is_none_is_written_too() -> None:
    ((_, _, got),) = read(write_page([Family("x", "gauge", "X.", (), {(): math.nan})]))
    assert math.isnan(got)


@pytest.mark.parametrize("kind", ["counter", "gauge"])
def test_each_family_says_what_it_is(kind: Kind) -> None:
    name = "things_total" if kind == "counter" else "things"
    (family,) = text_string_to_metric_families(write_page([Family(name, kind, "Things.", (), {(): 3})]).decode())
    assert (family.type, family.documentation, family.samples[0].name) == (kind, "Things.", name)


@given(st.lists(st.floats(0, 20), max_size=30), st.booleans())
def test_a_histogram_is_written_as_the_clients_own(values: list[float], labelled: bool) -> None:
    bounds = (0.1, 1.0, 10.0)
    labels = {"tenant": "acme"} if labelled else {}
    registry = CollectorRegistry()
    theirs = TheirHistogram("wait_seconds", "Wait.", list(labels), registry=registry, buckets=bounds)
    ours = Histogram(bounds)
    for value in values:
        (theirs.labels(**labels) if labels else theirs).observe(value)
        ours.observe(value)
    if labels:
        theirs.labels(**labels)
    page = write_page([Family("wait_seconds", "histogram", "Wait.", tuple(labels), {tuple(labels.values()): ours})])
    # The client adds when each series began.
    wanted = [sample for sample in read(generate_latest(registry)) if not sample[0].endswith("_created")]
    assert list(read(page)) == wanted


def test_an_observation_can_be_counted_several_times_at_once() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5, times=3)
    histogram.observe(2.0)
    assert histogram.cumulative() == ([("1.0", 3), ("+Inf", 4)], 3.5)
