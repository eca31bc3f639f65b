"""The worker's HTTP port: /metrics for Prometheus, /healthz and /readyz for whoever watches the process."""

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, socket
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from prefixgate.config.address import Address

logger = logging.getLogger(__name__)

_REQUEST_SECONDS = 10.0
"""After which a client that says nothing is let go of."""


class StatusPage:
    """Serves on threads of its own, so that no step and no stream can hold up a probe."""

    def __init__(
        self, address: Address, registry: CollectorRegistry, *, live: Callable[[], bool], ready: Callable[[], bool]
    ) -> None:
        """Listen; raises OSError where the address cannot be had."""
        self._server = _Server(address, registry, live=live, ready=ready)
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is listened on, also where the address left it open."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, address: Address, registry: CollectorRegistry, *, live: Callable[[], bool], ready: Callable[[], bool]
    ) -> None:
        self.address_family = AF_INET6 if ":" in address.host else AF_INET
        self.registry = registry
        self.checks = {"/healthz": live, "/readyz": ready}
        super().__init__((address.host, address.port), _Handler)

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """Log instead of printing; a client that goes away amid an answer is nothing to alarm anyone with."""
        logger.debug("A request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._metrics()
        elif path in self.server.checks:
            well = self.server.checks[path]()
            self._answer(200 if well else 503, "text/plain; charset=utf-8", b"ok\n" if well else b"no\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", b"there are /metrics, /healthz and /readyz\n")

    def _metrics(self) -> None:
        try:
            encoder, kind = choose_encoder(self.headers.get("Accept", ""))
            page = encoder(self.server.registry)
        except Exception:
            logger.exception("The metrics could not be read")
            self._answer(500, "text/plain; charset=utf-8", b"the metrics could not be read\n")
        else:
            self._answer(200, kind, page)

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log through the process's log, below what it shows by default: scrapes come every few seconds."""
        logger.debug(format, *arguments)
