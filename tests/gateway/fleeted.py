"""A gateway in front of several fake workers, each of which the test answers for."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.gateway.fake_worker import FakeCall, FakeSession, FakeWorker, describe, serving
from tests.gateway.rig import Client, gateway, gateway_client, prompt

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Fleeted:
    """A gateway, its client, and the workers with the gateway's session at each."""

    def __init__(
        self, client: Client, addresses: list[str], workers: list[FakeWorker], sessions: list[FakeSession]
    ) -> None:
        self.client = client
        self.addresses = addresses
        self.workers = workers
        self.sessions = sessions
        self._arrived: list[tuple[int, FakeCall]] = []

    def complete(self, text: str = "hi", **fields: Any) -> Any:
        return self.client.stub.Complete(prompt(text, **fields))

    async def next_call(self) -> tuple[int, FakeCall]:
        """Wait until a call comes to any of the workers, and tell which."""
        if not self._arrived:
            waits = [asyncio.ensure_future(session.calls.get()) for session in self.sessions]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for index, wait in enumerate(waits):
                if wait.done():
                    self._arrived.append((index, wait.result()))
                else:
                    wait.cancel()
        return self._arrived.pop(0)

    def is_idle(self) -> bool:
        """Whether no worker has a call that the test has not taken."""
        return not self._arrived and all(session.calls.empty() for session in self.sessions)

    async def metrics(self, name: str) -> list[float]:
        """Read a metric of each worker."""
        page = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in await self._lines() if line[0] != "#"
        }
        return [page[f'prefixgate_gateway_worker_{name}{{worker="{address}"}}'] for address in self.addresses]

    async def until(self, name: str, *values: float) -> None:
        """Wait until a metric of the workers has these values."""
        while await self.metrics(name) != list(values):
            pass

    async def _lines(self) -> list[str]:
        return (await self.client.metrics()).splitlines()


@asynccontextmanager
async def fleeted(
    folder: Path, *workers: FakeWorker, also: Sequence[str] = (), **options: Any
) -> AsyncIterator[Fleeted]:
    """Run everything; ``options`` are those of ``gateway``."""
    async with AsyncExitStack() as stack:
        addresses = [
            await stack.enter_async_context(serving(worker, folder / str(index)))
            for index, worker in enumerate(workers)
        ]
        running = await stack.enter_async_context(gateway(*addresses, *also, **options))
        client = await stack.enter_async_context(gateway_client(running))
        sessions = [await worker.sessions.get() for worker in workers]
        yield Fleeted(client, addresses, list(workers), sessions)


async def code_of(pending: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pending
    return caught.value.code()


def workers(count: int) -> list[FakeWorker]:
    return [FakeWorker(describe(incarnation=f"life-{index}")) for index in range(count)]
