"""A metrics page as Prometheus reads it."""

import urllib.request
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, frozenset[tuple[str, str]]]
"""A sample's name and labels."""


class Page:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.samples: dict[Series, float] = {}
        self.kinds: dict[str, str] = {}
        """Type of each metric, by its name as it stands on the page."""
        for family in text_string_to_metric_families(text):
            self.kinds[family.name + "_total" * (family.type == "counter")] = family.type
            for sample in family.samples:
                self.samples[sample.name, frozenset(sample.labels.items())] = sample.value

    def total(self, name: str, **labels: str) -> float:
        """Add up the series of a name that have these labels, whatever others they have; 0 where there are none."""
        return sum(value for found, value in self._series(name) if found >= labels.items())

    def by(self, label: str, name: str) -> dict[str, float]:
        """Add up the series of a name for each value of a label."""
        sums: dict[str, float] = {}
        for labels, value in self._series(name):
            key = dict(labels)[label]
            sums[key] = sums.get(key, 0) + value
        return sums

    def labels(self, name: str) -> set[str]:
        """Name the labels that a metric's samples carry; a histogram's ``le`` is none of its own."""
        names = (name, f"{name}_count")
        return {label for series, found in self.samples if series in names for label, _ in found}

    def counters(self) -> dict[Series, float]:
        """Pick what may never fall: counters, and what histograms count."""
        return {
            series: value
            for series, value in self.samples.items()
            if series[0].endswith(("_total", "_bucket", "_count", "_sum"))
        }

    def _series(self, name: str) -> Iterator[tuple[frozenset[tuple[str, str]], float]]:
        return ((labels, value) for (found, labels), value in self.samples.items() if found == name)


def fetch(url: str) -> str:
    """Read a page as it stands."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def scrape(url: str) -> Page:
    """Read a page."""
    return Page(fetch(url))
