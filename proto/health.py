"""The standard health service, with watches that can be ended."""

import asyncio
from collections.abc import Sequence
from typing import Any

from grpc import StatusCode
from grpc.aio import ServicerContext
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

LIVENESS = "liveness"
"""SERVING as long as the process answers at all: while it loads and while it drains too."""
READINESS = "readiness"
"""As the process as a whole and its service: whether calls are served now."""

_SERVING, _NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


class Health(health.aio.HealthServicer):
    """Answers for the process as a whole, for its service, and for liveness and readiness by these names.

    A watch has no end of its own, and would make every shutdown wait for it; so all can be ended from here.
    """

    def __init__(self, service_name: str) -> None:
        super().__init__()
        self._readiness: Sequence[str] = ("", service_name, READINESS)
        self._watches: set[asyncio.Task[Any]] = set()

    async def tell(self, *, serving: bool) -> None:
        """Tell whether calls are served, now and to whoever watches. Of no effect after ``drain``, but for liveness."""
        await self.set(LIVENESS, _SERVING)
        for name in self._readiness:
            await self.set(name, _SERVING if serving else _NOT_SERVING)

    async def drain(self) -> None:
        """Tell that no calls are served any more, for good; the process still lives."""
        await self.tell(serving=False)
        self._readiness = ()

    def close(self) -> None:
        """End all watches."""
        for watch in self._watches:
            watch.cancel()

    async def Watch(
        self, request: HealthCheckRequest, context: ServicerContext[HealthCheckRequest, HealthCheckResponse]
    ) -> None:
        """Tell the state of a service whenever it changes."""
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            await super().Watch(request, context)
        except asyncio.CancelledError:
            # Let through, it would leave a watcher that did not cancel without a status, waiting for ever.
            if context.cancelled():
                raise
            await context.abort(StatusCode.UNAVAILABLE, "the server is shutting down")
        finally:
            self._watches.discard(task)
