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
        self._watches: dict[asyncio.Task[object], asyncio.Event] = {}
        """Each with the news that it has not told yet."""
        self._is_closed = False

    def tell(self, *, serving: bool) -> None:
        """Tell whether calls are served, now and to whoever watches. Of no effect after ``drain``, but for liveness."""
        self._states[LIVENESS] = _SERVING
        for name in self._readiness:
            self._states[name] = _SERVING if serving else _NOT_SERVING
        for news in self._watches.values():
            news.set()

    def drain(self) -> None:
        """Tell that no calls are served any more, for good; the process still lives."""
        self.tell(serving=False)
        self._readiness = ()

    def close(self) -> None:
        """End all watches, and those that still come."""
        self._is_closed = True
        for watch in self._watches:
            watch.cancel()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        """Tell the state of a service."""
        if request.service not in self._states:
            await context.abort(StatusCode.NOT_FOUND, "there is no such service")
        return HealthCheckResponse(status=self._states[request.service])

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:
        """Tell the state of a service whenever it changes."""
        task = asyncio.current_task()
        assert task is not None
        news = self._watches[task] = asyncio.Event()
        try:
            if not self._is_closed:
                await self._watch(request.service, news, context)
        except asyncio.CancelledError:
            # Let through, it would leave a watcher that did not cancel without a status, waiting for ever.
            if context.cancelled():
                raise
        finally:
            del self._watches[task]
        await context.abort(StatusCode.UNAVAILABLE, "the server is shutting down")

    async def _watch(self, service: str, news: asyncio.Event, context: Context) -> None:
        told = None
        while True:
            # What comes while a write waits for its reader is told next, and only the last of it.
            news.clear()
            state = self._states.get(service, _UNKNOWN)
            if state != told:
                await context.write(HealthCheckResponse(status=state))
                told = state
            await news.wait()
