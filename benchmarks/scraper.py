"""Reads a page again and again on one connection, as Prometheus does, and writes how long each took.

    python -m benchmarks.scraper URL SECONDS

SECONDS are the pause between two readings. A process of its own: in one that reads streams meanwhile, the time would be
that process's. Ends with its standard input, and then writes one JSON object: ``ms``, and ``series`` of the last page.
"""

import http.client
import json
import sys
import threading
import time
from urllib.parse import urlsplit


def scrape(url: str, pause: float) -> None:
    """Read until standard input ends."""
    asked_to_end = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        asked_to_end.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    times, body = [], b""
    while not asked_to_end.wait(pause):
        begin = time.perf_counter()
        connection.request("GET", parts.path)
        body = connection.getresponse().read()
        times.append((time.perf_counter() - begin) * 1e3)
    series = sum(not line.startswith(b"#") for line in body.splitlines())
    print(json.dumps({"ms": times, "series": series}))


if __name__ == "__main__":
    scrape(sys.argv[1], float(sys.argv[2]))
