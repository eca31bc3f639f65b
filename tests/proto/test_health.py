"""The health service as its watchers see it, also where one of them does not read."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from prefixgate.proto.health import LIVENESS, READINESS, Context, Health

SERVICE = "prefixgate.v1.Test"
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


class AbortedError(Exception):
    """What ends a handler that aborts."""


class Watcher:
    """The client of one call, which takes what it is told or does not."""

    def __init__(self, *, reads: bool = True) -> None:
        self.told: asyncio.Queue[int] = asyncio.Queue()
        self.code: grpc.StatusCode | None = None
        self.is_reading = asyncio.Event()
        if reads:
            self.is_reading.set()

    async def write(self, response: HealthCheckResponse) -> None:
        await self.is_reading.wait()
        self.told.put_nowait(response.status)

    async def abort(self, code: grpc.StatusCode, _: str) -> None:
        self.code = code
        raise AbortedError

    def watch(self, health: Health, service: str = SERVICE) -> "asyncio.Task[None]":
        return asyncio.create_task(health.Watch(HealthCheckRequest(service=service), cast(Context, self)))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def turn() -> None:
    """Let every task do what it can do by now."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_watch_tells_each_change_and_nothing_twice() -> None:
    async def scenario() -> None:
        health, watcher = Health(SERVICE), Watcher()
        health.tell(serving=False)
        watching = watcher.watch(health)
        for serving in (False, True, True, False):
            health.tell(serving=serving)
            await turn()
        assert [watcher.told.get_nowait() for _ in range(watcher.told.qsize())] == [NOT_SERVING, SERVING, NOT_SERVING]
        watching.cancel()

    run(scenario())


def test_who_does_not_read_keeps_nobody_from_being_told() -> None:
    async def scenario() -> None:
        health, deaf, watcher = Health(SERVICE), Watcher(reads=False), Watcher()
        health.tell(serving=False)
        watches = [deaf.watch(health), watcher.watch(health)]
        assert await watcher.told.get() == NOT_SERVING
        health.tell(serving=True)
        assert await watcher.told.get() == SERVING
        answer = await health.Check(HealthCheckRequest(service=READINESS), cast(Context, watcher))
        assert answer.status == SERVING
        health.drain()
        assert await watcher.told.get() == NOT_SERVING
        # It hears the rest of what it was being told, and then how things stand.
        deaf.is_reading.set()
        assert [await deaf.told.get() for _ in range(1)] == [NOT_SERVING]
        health.close()
        for watch in watches:
            with pytest.raises(AbortedError):
                await watch

    run(scenario())


def test_closing_ends_every_watch_with_a_status_and_those_that_come_later_too() -> None:
    async def scenario() -> None:
        health, watcher, late = Health(SERVICE), Watcher(), Watcher()
        watches = [watcher.watch(health)]
        await turn()
        health.close()
        for watch in [*watches, late.watch(health)]:
            with pytest.raises(AbortedError):
                await watch
        assert [one.code for one in (watcher, late)] == [grpc.StatusCode.UNAVAILABLE] * 2

    run(scenario())


def test_a_write_that_is_under_way_is_not_cut_off() -> None:
    async def scenario() -> None:
        health, deaf = Health(SERVICE), Watcher(reads=False)
        watch = deaf.watch(health)
        await turn()
        health.close()
        await turn()
        # Two operations of one call at once are refused by gRPC.
        assert deaf.code is None
        deaf.is_reading.set()
        with pytest.raises(AbortedError):
            await watch
        assert deaf.code is grpc.StatusCode.UNAVAILABLE

    run(scenario())


def test_a_watcher_that_leaves_is_forgotten() -> None:
    async def scenario() -> None:
        health, gone = Health(SERVICE), Watcher()
        leaving = gone.watch(health)
        await turn()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        health.tell(serving=True)
        health.close()
        assert gone.code is None

    run(scenario())


def test_liveness_outlasts_the_drain_and_readiness_does_not() -> None:
    async def scenario() -> None:
        health, client = Health(SERVICE), Watcher()
        context = cast(Context, client)
        health.tell(serving=True)
        health.drain()
        health.tell(serving=True)
        states = [
            (await health.Check(HealthCheckRequest(service=name), context)).status
            for name in ("", SERVICE, READINESS, LIVENESS)
        ]
        assert states == [NOT_SERVING, NOT_SERVING, NOT_SERVING, SERVING]
        with pytest.raises(AbortedError):
            await health.Check(HealthCheckRequest(service="other"), context)
        assert client.code is grpc.StatusCode.NOT_FOUND

    run(scenario())
