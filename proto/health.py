"""The standard health service, with watches that can be ended."""

import asyncio
from collections.abc import Sequence
from typing import Any

from grpc import StatusCode
from grpc.aio import ServicerContext
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

LIVENESS = "liveness"
"""SERVING as long as the process answers at all: while it loads and while it drains too."""
READINESS = "readiness"
"""As the process as a whole and its service: whether calls are served now."""

_SERVING, _NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
_UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN

Context = ServicerContext[HealthCheckRequest, HealthCheckResponse]


class Health(HealthServicer):
    """Answers for the process as a whole, for its service, and for liveness and readiness by these names.

    A watch has no end of its own, and would make every shutdown wait for it; so all can be ended from here. The
    library's own servicer was rejected: it holds a lock while it writes to a watch, so that anyone who opens one and
    does not read keeps the state from being told, and the process from draining.
    """

    def __init__(self, service_name: str) -> None:
        self._readiness: Sequence[str] = ("", service_name, READINESS)
        self._states: dict[str, Any] = {"": _NOT_SERVING}  # the type hints know no type of these values
        self._watches: set[asyncio.Event] = set()
        """Of each, the news that it has not told yet."""
        self._is_closed = False

    def tell(self, *, serving: bool) -> None:
        """Tell whether calls are served, now and to whoever watches. Of no effect after ``drain``, but for liveness."""
        self._states[LIVENESS] = _SERVING
        for name in self._readiness:
            self._states[name] = _SERVING if serving else _NOT_SERVING
        self._wake()

    def drain(self) -> None:
        """Tell that no calls are served any more, for good; the process still lives."""
        self.tell(serving=False)
        self._readiness = ()

    def close(self) -> None:
        """End all watches, and those that still come.

        None is cancelled: amid a write that would leave the call with two operations at once, which gRPC refuses, and
        its watcher without a status. One whose reader does not read ends with the server.
        """
        self._is_closed = True
        self._wake()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        """Tell the state of a service."""
        if request.service not in self._states:
            await context.abort(StatusCode.NOT_FOUND, "there is no such service")
        return HealthCheckResponse(status=self._states[request.service])

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:
        """Tell the state of a service whenever it changes."""
        news = asyncio.Event()
        self._watches.add(news)
        told = None
        try:
            while not self._is_closed:
                # What comes while a write waits for its reader is told next, and only the last of it.
                news.clear()
                state = self._states.get(request.service, _UNKNOWN)
                if state == told:
                    await news.wait()
                else:
                    await context.write(HealthCheckResponse(status=state))
                    told = state
        finally:
            self._watches.discard(news)
        await context.abort(StatusCode.UNAVAILABLE, "the server is shutting down")

    def _wake(self) -> None:
        for news in self._watches:
            news.set()
