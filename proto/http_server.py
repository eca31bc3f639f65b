"""The plain HTTP port of a process: its metrics, and yes-or-no pages for whoever restarts or routes."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from prefixgate.proto.exposition import CONTENT_TYPE
from prefixgate.proto.metrics_page import MetricsPage

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 75.0
"""A connection that sends nothing is closed, so that none holds a thread for ever. Longer than scrapes are apart."""

MAX_CONNECTIONS = 128
"""At the same time; each has a thread."""
MAX_HEAD_BYTES = 64 << 10
"""Of a request. The library alone would take a hundred times as much, of whoever can reach the port."""

_STOP_POLL_SECONDS = 0.1
"""How often the library's server looks whether it should stop."""

_TEXT = "text/plain; charset=utf-8"


class Check(NamedTuple):
    """The answer to a yes-or-no page: 200 or 503, and why."""

    well: bool
    why: str


class Request(NamedTuple):
    """A GET, as a page sees it."""

    headers: Mapping[str, str]
    """By names in lower case. Of a header that was sent more than once, all values with commas between them."""
    client: str
    """IP address of the other end of the connection."""


class Answer(NamedTuple):
    """What is sent back."""

    status: HTTPStatus
    headers: Mapping[str, str]
    body: bytes


def plain(status: HTTPStatus, text: str) -> Answer:
    """Answer with a line of text."""
    return Answer(status, {"Content-Type": _TEXT}, f"{text}\n".encode())


class HttpServer:
    """Serves in threads of its own, so that neither a busy event loop nor a step can hold up a probe.

    ``/metrics`` is the page; each path of ``checks`` is 200 where its check is well, else 503. Whether the process
    should be restarted, should get calls, and has room for more are three questions with a path each. ``pages`` make
    their answers themselves, and say themselves who may have them.
    """

    def __init__(
        self,
        host: str,
        port: int,
        page: MetricsPage,
        checks: Mapping[str, Callable[[], Check]],
        pages: Mapping[str, Callable[[Request], Answer]] = MappingProxyType({}),
    ) -> None:
        """Listen. Raises OSError where that fails."""
        self._page = page
        self._checks = checks
        self._pages = pages
        self._server = _server_of(host)((host, port), lambda *args: _Handler(self.answer, *args))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_STOP_POLL_SECONDS,), name="http", daemon=True
        )

    @property
    def port(self) -> int:
        """The port that is listened on, also where the address left it open."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._page.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for the server's thread where it was started."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._page.stop()

    def answer(self, path: str, request: Request) -> Answer:
        """Make the answer to a GET."""
        path = path.partition("?")[0]
        try:
            if path == "/metrics":
                return self._metrics()
            if path in self._pages:
                return self._pages[path](request)
        except Exception:
            logger.exception("%s could not be made", path)
            return plain(HTTPStatus.INTERNAL_SERVER_ERROR, "the page could not be made")
        if path in self._checks:
            check = self._checks[path]()
            return plain(HTTPStatus.OK if check.well else HTTPStatus.SERVICE_UNAVAILABLE, check.why)
        there = ", ".join(["/metrics", *self._checks, *self._pages])
        return plain(HTTPStatus.NOT_FOUND, f"here are {there}")

    def _metrics(self) -> Answer:
        page = self._page.read()
        return Answer(HTTPStatus.OK, {"Content-Type": CONTENT_TYPE, "Age": str(int(page.age_seconds))}, page.body)


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_SECONDS
    # Connections are kept, as whoever scrapes and probes does so again and again.
    protocol_version = "HTTP/1.1"
    # Headers and body go out together: in two packets, the second would wait for the first one's acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True

    def __init__(self, answer: Callable[[str, Request], Answer], *args: object) -> None:
        self._answer = answer
        super().__init__(*args)  # type: ignore[arg-type]

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _Heads(self.rfile)

    def handle_one_request(self) -> None:
        self.rfile.begin()
        super().handle_one_request()

    def do_GET(self) -> None:
        asked = _joined(self.headers.items())
        status, headers, body = self._answer(self.path, Request(asked, self.client_address[0]))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if asked.get("content-length", "0") != "0" or "transfer-encoding" in asked:
            # A body is not read, and must not pass for the next request: a proxy in front can send two people's on
            # one connection.
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.server.answered(self.request)  # type: ignore[attr-defined]  # of the class below

    def log_message(self, format: str, *args: object) -> None:
        """Log below what is shown by default: a scrape every few seconds is no news."""
        logger.debug(format, *args)


class _Heads:
    """Reads the lines of requests' heads, each head of a bounded length."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = MAX_HEAD_BYTES
        self.close = file.close

    def begin(self) -> None:
        """Begin with the next request."""
        self._left = MAX_HEAD_BYTES

    def readline(self, most: int) -> bytes:
        """Read a line. Raises LineTooLong, which the library answers by itself."""
        line = self._file.readline(min(most, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("head")
        return line


def _joined(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in pairs:
        name = name.lower()
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined


def _server_of(host: str) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True
        # The library's five are fewer than come at once when many probes and scrapes share a second.
        request_queue_size = MAX_CONNECTIONS

        def __init__(self, *args: Any) -> None:
            self._lock = threading.Lock()
            self._open: dict[socket.socket, None] = {}
            """Connections, the one that has waited longest since its last answer first."""
            super().__init__(*args)

        def process_request(self, request: Any, client_address: Any) -> None:
            """Take a connection, in place of the oldest one where there are too many.

            To refuse it was rejected: whoever opens many and says nothing would keep probes and scrapes out.
            """
            with self._lock:
                self._open[request] = None
                oldest = next(iter(self._open)) if len(self._open) > MAX_CONNECTIONS else None
                if oldest is not None:
                    del self._open[oldest]
                    with contextlib.suppress(OSError):  # it is gone already
                        oldest.shutdown(socket.SHUT_RDWR)
            super().process_request(request, client_address)

        def answered(self, request: Any) -> None:
            """Note that a connection got an answer."""
            with self._lock:
                if request in self._open:
                    del self._open[request]
                    self._open[request] = None

        def shutdown_request(self, request: Any) -> None:
            with self._lock:
                self._open.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Log instead of printing; a client that goes away amid an answer is nothing to alarm anyone with."""
            logger.debug("A request of %s failed", client_address, exc_info=True)

    return Server
