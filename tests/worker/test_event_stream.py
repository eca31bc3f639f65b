"""The cache's events over a real socket: a picture of the index that is right after each of its numbers."""

import asyncio
from collections.abc import Sequence

import grpc.aio
import pytest
from grpc import StatusCode

from prefixgate.cache.events import Event, Stored
from prefixgate.cache.hashing import ROOT_HASH, BlockHash, CacheScope
from prefixgate.proto import worker_pb2
from prefixgate.worker.cache_feed import CacheFeed, Snapshot
from prefixgate.worker.event_stream import MAX_PENDING_HASHES, PART_HASHES, EventStream, EventStreamClosedError
from tests.worker.driver import Driver, words
from tests.worker.hosting import HANG_SECONDS, INCARNATION, Host, on_host

EventsCall = grpc.aio.UnaryStreamCall[worker_pb2.EventsRequest, worker_pb2.EventBatch]


class Picture:
    """What a gateway knows of a worker's cache, from the messages of one stream."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {}
        self.number = 0
        self.load = worker_pb2.WorkerLoad()
        self.snapshots = 0
        self.is_whole = True

    def take(self, batch: worker_pb2.EventBatch) -> None:
        if batch.HasField("load"):
            self.load = batch.load
        if batch.snapshot:
            if self.is_whole:
                self.held = {}
                self.snapshots += 1
            self.number = batch.first_number
            self.is_whole = batch.snapshot == worker_pb2.SNAPSHOT_PART_LAST
        elif batch.events:
            assert self.is_whole
            assert batch.first_number == self.number + 1
            self.number += len(batch.events)
        for event in batch.events:
            self._change(event)

    def _change(self, event: worker_pb2.CacheEvent) -> None:
        if event.HasField("stored"):
            self.held.setdefault(event.stored.tenant, set()).update(split(event.stored.hashes))
        elif event.HasField("removed"):
            self.held[event.removed.tenant] -= set(split(event.removed.hashes))
        else:
            self.held.pop(event.cleared, None)

    @property
    def blocks(self) -> set[tuple[str, bytes]]:
        return {(tenant, block_hash) for tenant, hashes in self.held.items() for block_hash in hashes}


def split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + 16] for at in range(0, len(hashes), 16)]


async def read(host: Host, picture: Picture, stream: "EventsCall") -> None:
    """Read on until the picture is as new as the cache, which is at rest."""
    await host.until_idle()
    async with asyncio.timeout(HANG_SECONDS):
        while picture.number < host.driver.cache.events.last or not (picture.snapshots and picture.is_whole):
            batch = await stream.read()
            assert isinstance(batch, worker_pb2.EventBatch)
            picture.take(batch)
    assert picture.blocks == set(host.driver.cache.snapshot())


async def run_call(host: Host, call_id: int, prompt: Sequence[int], tenant: str = "acme") -> None:
    gateway = await host.gateway()
    heard = await gateway.submit(call_id, prompt, tenant=tenant)
    await gateway.until(heard, ends=1)
    gateway.stream.cancel()


def test_a_gateway_sees_what_is_cached_now_and_what_comes_and_goes_after() -> None:
    async def scenario(host: Host) -> None:
        await run_call(host, 1, words(50, seed=1))
        stream, picture = host.stub.Events(worker_pb2.EventsRequest(incarnation=INCARNATION)), Picture()
        await read(host, picture, stream)
        assert len(picture.held["acme"]) == 3
        # More than the pool has: some of what was there goes.
        for seed in range(2, 12):
            await run_call(host, seed, words(200, seed=seed), tenant=f"tenant-{seed % 3}")
            await read(host, picture, stream)
        assert picture.snapshots == 1
        hasher, spec = host.driver.cache.hasher, host.driver.runner.spec
        scope = CacheScope("tenant-2", f"{spec.name}@{spec.fingerprint}")
        assert set(hasher.hash_tokens(scope, words(200, seed=11))) <= picture.held["tenant-2"]
        await asyncio.wrap_future(host.driver.engine.questions.ask("tenant-2", lambda it: it.flush("tenant-2", None)))
        await read(host, picture, stream)
        assert not picture.held.get("tenant-2")
        stream.cancel()

    on_host(scenario)


def test_a_worker_that_drains_says_so() -> None:
    async def scenario(host: Host) -> None:
        stream, picture = host.stub.Events(worker_pb2.EventsRequest(incarnation=INCARNATION)), Picture()
        await read(host, picture, stream)
        assert picture.load == worker_pb2.WorkerLoad()
        host.service.drain()
        async with asyncio.timeout(HANG_SECONDS):
            while not picture.load.draining:
                batch = await stream.read()
                assert isinstance(batch, worker_pb2.EventBatch)
                picture.take(batch)
        stream.cancel()

    on_host(scenario)


@pytest.mark.parametrize("incarnation", ["", "another"])
def test_another_life_is_refused(incarnation: str) -> None:
    async def scenario(host: Host) -> None:
        stream = host.stub.Events(worker_pb2.EventsRequest(incarnation=incarnation))
        assert await stream.code() is StatusCode.FAILED_PRECONDITION
        assert "incarnation" in (await stream.details() or "")

    on_host(scenario)


def test_a_worker_that_closes_ends_the_stream() -> None:
    async def scenario(host: Host) -> None:
        stream = host.stub.Events(worker_pb2.EventsRequest(incarnation=INCARNATION))
        await stream.read()
        await host.service.close()
        assert await stream.code() is StatusCode.UNAVAILABLE

    on_host(scenario)


class Log:
    """An event log with a feed of its own, and a stream that follows it."""

    def __init__(self, driver: Driver) -> None:
        self.cache = driver.cache
        self.feed = CacheFeed(driver.cache)
        self.blocks: list[tuple[str, BlockHash]] = []
        self.load = worker_pb2.WorkerLoad()
        self.stream = EventStream(self.feed, self._take, lambda: self.load)
        self.sent: asyncio.Queue[worker_pb2.EventBatch] = asyncio.Queue()
        self.may_send = asyncio.Semaphore(0)

    async def _take(self) -> Snapshot:
        return Snapshot(self.cache.events.last, list(self.blocks))

    async def send(self, batch: worker_pb2.EventBatch) -> None:
        self.sent.put_nowait(batch)
        await self.may_send.acquire()

    def store(self, tenant: str, hashes: Sequence[BlockHash]) -> None:
        self.cache.events.stored(tenant, ROOT_HASH, hashes)
        self.blocks += [(tenant, block_hash) for block_hash in hashes]
        self.feed.publish()


def hashes_from(start: int, count: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(16, "big")) for number in range(start, start + count)]


def test_a_gateway_that_does_not_read_costs_a_bounded_number_of_hashes_and_gets_a_snapshot_anew() -> None:
    async def scenario() -> None:
        log, picture = Log(Driver()), Picture()
        running = asyncio.create_task(log.stream.run(log.send))
        picture.take(await log.sent.get())  # and its send goes on and on
        for number in range(3):
            log.store("acme", hashes_from(number * MAX_PENDING_HASHES, MAX_PENDING_HASHES // 2 + 1))
        await asyncio.sleep(0)  # the news of other threads have arrived
        log.may_send.release()
        async with asyncio.timeout(HANG_SECONDS):
            while picture.number < 3 or not picture.is_whole:
                picture.take(await log.sent.get())
                log.may_send.release()
        assert picture.snapshots == 2
        assert picture.blocks == set(log.blocks)
        assert len(log.blocks) > PART_HASHES  # so the snapshot came in parts
        log.store("acme", hashes_from(1 << 30, 2))
        picture.take(await log.sent.get())
        assert (picture.number, picture.snapshots) == (4, 2)
        log.stream.close()
        log.may_send.release()
        with pytest.raises(EventStreamClosedError):
            await running

    asyncio.run(scenario())


def test_flushes_again_and_again_cost_a_gateway_that_does_not_read_no_more() -> None:
    """They bring events without a hash."""

    async def scenario() -> None:
        log, picture = Log(Driver()), Picture()
        running = asyncio.create_task(log.stream.run(log.send))
        picture.take(await log.sent.get())  # and its send goes on and on
        for _ in range(MAX_PENDING_HASHES // 8192 + 1):
            for _ in range(8192):
                log.cache.events.cleared("acme")
            log.feed.publish()
        await asyncio.sleep(0)  # the news of other threads have arrived
        log.may_send.release()
        picture.take(await log.sent.get())
        assert (picture.number, picture.snapshots) == (log.cache.events.last, 2)
        log.stream.close()
        log.may_send.release()
        with pytest.raises(EventStreamClosedError):
            await running

    asyncio.run(scenario())


def test_the_load_is_told_when_it_has_changed_and_not_again() -> None:
    async def scenario() -> None:
        log, picture = Log(Driver()), Picture()
        running = asyncio.create_task(log.stream.run(log.send))
        for load in (worker_pb2.WorkerLoad(), worker_pb2.WorkerLoad(running=2, waiting=1), worker_pb2.WorkerLoad()):
            log.load = load
            batch = await log.sent.get()
            assert batch.HasField("load")
            picture.take(batch)
            assert picture.load == load
            log.may_send.release()
        log.store("acme", hashes_from(0, 1))
        assert not (await log.sent.get()).HasField("load")
        running.cancel()

    asyncio.run(scenario())


def test_more_events_than_the_log_keeps_bring_a_snapshot_anew() -> None:
    async def scenario() -> None:
        log, picture = Log(Driver()), Picture()
        running = asyncio.create_task(log.stream.run(log.send))
        picture.take(await log.sent.get())
        for block_hash in hashes_from(0, 20_000):
            log.cache.events.stored("acme", ROOT_HASH, [block_hash])
        log.store("acme", hashes_from(20_000, 1))
        log.may_send.release()
        picture.take(await log.sent.get())
        assert (picture.snapshots, picture.number) == (2, 20_001)
        running.cancel()

    asyncio.run(scenario())


def test_a_follower_that_fails_hurts_neither_the_engine_nor_the_others() -> None:
    class Follower:
        def __init__(self, fails: bool) -> None:
            self.fails = fails
            self.heard: list[Event] = []

        def hear(self, events: Sequence[tuple[int, Event]] | None) -> None:
            if self.fails:
                raise RuntimeError("the loop is closed")
            self.heard += [event for _, event in events or ()]

    cache = Driver().cache
    feed, followers = CacheFeed(cache), [Follower(fails=True), Follower(fails=False)]
    for follower in followers:
        feed.follow(follower)
    cache.events.stored("acme", ROOT_HASH, hashes_from(0, 2))
    feed.publish()
    assert followers[1].heard == [Stored("acme", ROOT_HASH, tuple(hashes_from(0, 2)))]
    feed.leave(followers[1])
    cache.events.cleared("acme")
    feed.publish()
    assert len(followers[1].heard) == 1
