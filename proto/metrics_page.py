"""The page that Prometheus reads: made now and then, and served as bytes in between."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from prefixgate.proto.exposition import Family, write_page

MAX_TENANT_LABELS = 32
"""Tenants that have series of their own, in the order of the configuration. All others together are ``other``, so that
the page has a bound that is known, however many tenants there are."""

MAX_SERIES = 10_000
"""What both processes keep their pages below with the most tenants that have series of their own."""


class Rendering(NamedTuple):
    """A page, and how old it is."""

    body: bytes
    age_seconds: float


class MetricsPage:
    """Renders on the thread that asks, which is never the event loop's.

    A page is served again until it is ``max_age_seconds`` old. So a scrape costs the process a few milliseconds at most
    a few times a second, whoever scrapes and however often. Rendering beside the scrapes, in a thread of its own, was
    rejected: it would cost the same when nobody looks, and show older figures.
    """

    def __init__(self, max_age_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """The page is empty until ``show``."""
        self._max_age_seconds = max_age_seconds
        self._clock = clock
        self._collect: Callable[[], Iterable[Family]] = tuple
        self._lock = threading.Lock()
        self._body = b""
        self._rendered_at = 0.0

    def show(self, collect: Callable[[], Iterable[Family]]) -> None:
        """Show what ``collect`` returns from now on. It is called on other threads than the event loop's."""
        with self._lock:
            self._collect, self._body = collect, b""

    def read(self) -> Rendering:
        """Return the page, at most so old as is allowed. Raises what ``collect`` raises."""
        with self._lock:
            age = self._clock() - self._rendered_at
            if self._body and age < self._max_age_seconds:
                return Rendering(self._body, age)
            rendered_at = self._clock()
            self._body = write_page(self._collect())
            self._rendered_at = rendered_at
            return Rendering(self._body, 0.0)
