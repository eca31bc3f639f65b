"""Metrics as plain numbers, and Prometheus's text format written from them.

Counting happens between two tokens of a stream, and a page of a thousand series is written while streams run, so both
are done here in a few operations each. The Prometheus client library, which does more, took ten times as long.
"""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge", "histogram"]


class Histogram:
    """Observations counted in buckets. Written by one thread, read by any."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, seen so many times, into the first bucket whose bound is not below it."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def cumulative(self) -> tuple[list[tuple[str, int]], float]:
        """Return (bound, observations up to it) pairs, the last bound infinite, and the sum of all values."""
        counts, total, buckets = list(self._counts), 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets, self._sum


Value: TypeAlias = "float | Histogram"
Samples: TypeAlias = Mapping[tuple[str, ...], Value]
"""Values by label values, the latter in the order of the metric's labels."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with all of its series, as a page shows it."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    samples: Samples


def write_page(families: Iterable[Family]) -> bytes:
    """Write families in the text format, version 0.0.4, one after the other."""
    lines: list[str] = []
    for family in families:
        name = family.name
        lines.append(f"# HELP {name} {_escaped(family.help)}\n# TYPE {name} {family.kind}\n")
        # By name, as the Prometheus client has them, so that pages can be searched for a series as it stands there.
        order = sorted(range(len(family.labels)), key=family.labels.__getitem__)
        for values, value in family.samples.items():
            labels = ",".join([f'{family.labels[at]}="{_quotable(values[at])}"' for at in order])
            if isinstance(value, Histogram):
                lines += _histogram(name, labels, value)
            else:
                lines.append(f"{name}{{{labels}}} {_number(value)}\n" if labels else f"{name} {_number(value)}\n")
    return "".join(lines).encode()


def _histogram(name: str, labels: str, histogram: Histogram) -> list[str]:
    buckets, total = histogram.cumulative()
    before = f"{name}_bucket{{{labels}," if labels else f"{name}_bucket{{"
    among = f"{{{labels}}}" if labels else ""
    lines = [f'{before}le="{bound}"}} {count}\n' for bound, count in buckets]
    return [*lines, f"{name}_count{among} {buckets[-1][1]}\n", f"{name}_sum{among} {_number(total)}\n"]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quotable(text: str) -> str:
    # Most need nothing done, which is quickly seen.
    return text if text.isalnum() else _escaped(text).replace('"', r"\"")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value + 0)  # a bool becomes a number
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
