"""The status page: files that come with the package, and the document that they show."""

import asyncio
import concurrent.futures
import importlib.resources
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any

from prefixgate.gateway.operator_access import OperatorAccess
from prefixgate.proto.http_server import Answer, Request, plain

_FILES = {
    "/status": ("status.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/status_map.js": ("status_map.js", "text/javascript; charset=utf-8"),
    "/status_charts.js": ("status_charts.js", "text/javascript; charset=utf-8"),
    "/status.svg": ("status.svg", "image/svg+xml"),
}

_HEADERS = {
    # Nothing from elsewhere, nothing inline, and in nobody's frame.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

_ANSWER_SECONDS = 10.0
"""Time that the event loop gets. It may be busy; that it hangs is for `/healthz` to say."""


def status_pages(
    access: OperatorAccess, read: Callable[[], Coroutine[Any, Any, bytes]], loop: asyncio.AbstractEventLoop
) -> Mapping[str, Callable[[Request], Answer]]:
    """Make the pages, by path. ``read`` gives the document, and runs on ``loop``, the pages on other threads."""

    def document(_: Request) -> Answer:
        too_late = plain(HTTPStatus.SERVICE_UNAVAILABLE, "the gateway is too busy to tell, or shuts down")
        coroutine = read()
        try:
            reading = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:
            # The loop is closed: a connection that was kept outlives the server by a moment.
            coroutine.close()
            return too_late
        try:
            body = reading.result(_ANSWER_SECONDS)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            reading.cancel()
            return too_late
        return Answer(HTTPStatus.OK, {"Content-Type": "application/json"}, body)

    pages = {path: _file(name, kind) for path, (name, kind) in _FILES.items()}
    return {path: _guarded(access, page) for path, page in {**pages, "/status.json": document}.items()}


def _file(name: str, kind: str) -> Callable[[Request], Answer]:
    body = (importlib.resources.files("prefixgate.gateway") / name).read_bytes()
    return lambda _: Answer(HTTPStatus.OK, {"Content-Type": kind}, body)


def _guarded(access: OperatorAccess, page: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
    def guarded(request: Request) -> Answer:
        answer = access.refusal(request) or page(request)
        return answer._replace(headers={**_HEADERS, **answer.headers})

    return guarded
