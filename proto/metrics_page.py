"""The page that Prometheus reads: made now and then, and served as bytes in between."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from prefixgate.proto.exposition import Family, write_page

logger = logging.getLogger(__name__)

MAX_TENANT_LABELS = 32
"""Tenants that have series of their own, in the order of the configuration. All others together are ``other``, so that
the page has a bound that is known, however many tenants there are."""

MAX_SERIES = 10_000
"""What both processes keep their pages below with the most tenants that have series of their own."""


_PAUSE_SECONDS = 0.0005
"""Between two metrics of a page that is made beside the scrapes: whoever waits for the interpreter gets it then."""


class Rendering(NamedTuple):
    """A page, and how old it is."""

    body: bytes
    age_seconds: float


class MetricsPage:
    """Renders on a thread of its own, every ``max_age_seconds``, once it is started; never on the event loop's.

    So a scrape waits for nothing but its bytes, and costs the streams the same whoever scrapes and however often. To
    render on the thread that asks was rejected after it had been measured: the slowest scrapes were those. An age of 0
    does that still, and so shows each scrape what is so at that moment.
    """

    def __init__(self, max_age_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """The page is empty until ``show``, and made by who asks until ``start``."""
        self._max_age_seconds = max_age_seconds
        self._clock = clock
        self._collect: Callable[[], Iterable[Family]] = tuple
        self._lock = threading.Lock()
        self._body = b""
        self._rendered_at = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._render_on, name="metrics", daemon=True)

    def show(self, collect: Callable[[], Iterable[Family]]) -> None:
        """Show what ``collect`` returns from now on. It is called on other threads than the event loop's."""
        with self._lock:
            self._collect, self._body = collect, b""

    def start(self) -> None:
        """Make the page from now on before it is asked for, unless each scrape is to have one of its own."""
        if self._max_age_seconds:
            self._thread.start()

    def stop(self) -> None:
        """Make no more pages on their own."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def read(self) -> Rendering:
        """Return the page with its age, made here where there is none or none that is young enough.

        Raises what ``collect`` raises.
        """
        with self._lock:
            age = self._clock() - self._rendered_at
            if self._body and (age < self._max_age_seconds or self._thread.is_alive()):
                return Rendering(self._body, age)
            rendered_at = self._clock()
            self._body = write_page(self._collect())
            self._rendered_at = rendered_at
            return Rendering(self._body, 0.0)

    def _render_on(self) -> None:
        while not self._stopped.wait(self._max_age_seconds):
            collect, rendered_at = self._collect, self._clock()
            try:
                body = self._rendered(collect)
            except Exception:
                # Who asks next makes the page, and is told that it cannot be made.
                logger.debug("The metrics could not be read", exc_info=True)
                body = b""
            with self._lock:
                if collect is self._collect:
                    self._body, self._rendered_at = body, rendered_at

    def _rendered(self, collect: Callable[[], Iterable[Family]]) -> bytes:
        # Read in one go, so that the figures belong together; written bit by bit, as that takes longer.
        pages: list[bytes] = []
        for family in tuple(collect()):
            pages.append(write_page((family,)))
            self._stopped.wait(_PAUSE_SECONDS)
        return b"".join(pages)
