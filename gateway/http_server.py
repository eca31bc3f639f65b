"""The plain HTTP side: metrics for Prometheus, and two yes-or-no pages for whoever restarts or routes."""

import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from prefixgate.config.address import Address

_IDLE_SECONDS = 10.0
"""A connection that sends nothing is closed, so that none holds a thread for ever."""

_STOP_POLL_SECONDS = 0.1
"""How often the library's server looks whether it should stop."""


class HttpServer:
    """Serves in threads of its own, so that a busy event loop cannot keep Prometheus waiting.

    ``/metrics`` is the registry; ``/healthz`` is 200 while the process lives; ``/readyz`` is 200 while it serves calls,
    else 503. They are two, since a gateway whose worker still loads should get no calls, but no restart either.
    """

    def __init__(self, address: Address, registry: CollectorRegistry, is_ready: Callable[[], bool]) -> None:
        """Bind. Raises OSError where that fails."""
        self._host = address.host
        self._registry = registry
        self._is_ready = is_ready
        self._server = _server_of(address)((address.host, address.port), lambda *args: _Handler(self.answer, *args))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_STOP_POLL_SECONDS,), name="http", daemon=True
        )

    @property
    def address(self) -> Address:
        """Where it listens, with the port that the system chose."""
        return Address(host=self._host, port=self._server.server_port)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop and wait for the server's thread. Only after ``start``."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        """Make the answer to a GET: status, content type and body."""
        text = "text/plain; charset=utf-8"
        match path.partition("?")[0]:
            case "/metrics":
                encode, content_type = choose_encoder(accept)
                return HTTPStatus.OK, content_type, encode(self._registry)
            case "/healthz":
                return HTTPStatus.OK, text, b"alive\n"
            case "/readyz" if self._is_ready():
                return HTTPStatus.OK, text, b"ready\n"
            case "/readyz":
                return HTTPStatus.SERVICE_UNAVAILABLE, text, b"not ready: no worker, or shutting down\n"
            case _:
                return HTTPStatus.NOT_FOUND, text, b"here are /metrics, /healthz and /readyz\n"


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_SECONDS

    def __init__(self, answer: Callable[[str, str], tuple[HTTPStatus, str, bytes]], *args: object) -> None:
        self._answer = answer
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        status, content_type, body = self._answer(self.path, self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape every few seconds is no news."""


def _server_of(address: Address) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        daemon_threads = True

    return Server
