"""The plain HTTP port of a process: its metrics, and yes-or-no pages for whoever restarts or routes."""

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from prefixgate.proto.exposition import CONTENT_TYPE
from prefixgate.proto.metrics_page import MetricsPage

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 75.0
"""A connection that sends nothing is closed, so that none holds a thread for ever. Longer than scrapes are apart."""

_STOP_POLL_SECONDS = 0.1
"""How often the library's server looks whether it should stop."""

_TEXT = "text/plain; charset=utf-8"


class Check(NamedTuple):
    """The answer to a yes-or-no page: 200 or 503, and why."""

    well: bool
    why: str


class HttpServer:
    """Serves in threads of its own, so that neither a busy event loop nor a step can hold up a probe.

    ``/metrics`` is the page; each path of ``checks`` is 200 where its check is well, else 503. Whether the process
    should be restarted, should get calls, and has room for more are three questions with a path each.
    """

    def __init__(self, host: str, port: int, page: MetricsPage, checks: Mapping[str, Callable[[], Check]]) -> None:
        """Listen. Raises OSError where that fails."""
        self._page = page
        self._checks = checks
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

    def answer(self, path: str) -> tuple[HTTPStatus, dict[str, str], bytes]:
        """Make the answer to a GET: status, headers and body."""
        path = path.partition("?")[0]
        if path == "/metrics":
            return self._metrics()
        if path in self._checks:
            check = self._checks[path]()
            status = HTTPStatus.OK if check.well else HTTPStatus.SERVICE_UNAVAILABLE
            return status, {"Content-Type": _TEXT}, f"{check.why}\n".encode()
        there = ", ".join(["/metrics", *self._checks])
        return HTTPStatus.NOT_FOUND, {"Content-Type": _TEXT}, f"here are {there}\n".encode()

    def _metrics(self) -> tuple[HTTPStatus, dict[str, str], bytes]:
        try:
            page = self._page.read()
        except Exception:
            logger.exception("The metrics could not be read")
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"Content-Type": _TEXT}, b"the metrics could not be read\n"
        return HTTPStatus.OK, {"Content-Type": CONTENT_TYPE, "Age": str(int(page.age_seconds))}, page.body


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_SECONDS
    # Connections are kept, as whoever scrapes and probes does so again and again.
    protocol_version = "HTTP/1.1"
    # Headers and body go out together: in two packets, the second would wait for the first one's acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True

    def __init__(self, answer: Callable[[str], tuple[HTTPStatus, dict[str, str], bytes]], *args: object) -> None:
        self._answer = answer
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        status, headers, body = self._answer(self.path)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log below what is shown by default: a scrape every few seconds is no news."""
        logger.debug(format, *args)


def _server_of(host: str) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Log instead of printing; a client that goes away amid an answer is nothing to alarm anyone with."""
            logger.debug("A request of %s failed", client_address, exc_info=True)

    return Server
