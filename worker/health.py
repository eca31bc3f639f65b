"""The standard health service, with watches that can be ended."""

import asyncio
from typing import Any

from grpc import StatusCode
from grpc.aio import ServicerContext
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from prefixgate.proto import worker_pb2

SERVICES = ("", worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name)
"""The names that can be asked for: the process as a whole, and the Worker service."""


class Health(health.aio.HealthServicer):
    """Tells all of its names the same. A watch has no end of its own, and would make every shutdown wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._watches: set[asyncio.Task[Any]] = set()

    async def tell(self, *, serving: bool) -> None:
        """Tell whether the worker serves, now and to whoever watches."""
        for name in SERVICES:
            await self.set(name, HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING)

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
            await context.abort(StatusCode.UNAVAILABLE, "the worker is shutting down")
        finally:
            self._watches.discard(task)
