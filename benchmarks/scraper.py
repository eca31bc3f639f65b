"""Reads pages in turn again and again, on one connection each, as Prometheus does, and writes how long each took.

    python -m benchmarks.scraper SECONDS URL ...

SECONDS are the pause between two readings. A process of its own: in one that reads streams meanwhile, the time would be
that process's. Ends with its standard input, and then writes a JSON list with an object for each page: ``ms``, and
``series`` of the last reading.
"""

import http.client
import itertools
import json
import sys
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit


class Reading:
    """One page, and how long it took each time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._path = parts.path
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        self._body = b""
        self._ms: list[float] = []

    def take(self) -> None:
        begin = time.perf_counter()
        self._connection.request("GET", self._path)
        self._body = self._connection.getresponse().read()
        self._ms.append((time.perf_counter() - begin) * 1e3)

    def found(self) -> dict[str, object]:
        return {"ms": self._ms, "series": sum(not line.startswith(b"#") for line in self._body.splitlines())}


def scrape(pause: float, urls: Sequence[str]) -> None:
    """Read until standard input ends."""
    asked_to_end = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        asked_to_end.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    readings = [Reading(url) for url in urls]
    for reading in itertools.cycle(readings):
        if asked_to_end.wait(pause):
            break
        reading.take()
    print(json.dumps([reading.found() for reading in readings]))


if __name__ == "__main__":
    scrape(float(sys.argv[1]), sys.argv[2:])
