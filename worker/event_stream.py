"""One gateway's picture of the cache and of the load: a snapshot, then what changes."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import groupby

from prefixgate.cache.events import Cleared, Event, Removed, Stored
from prefixgate.proto import worker_pb2
from prefixgate.worker.cache_feed import CacheFeed, Numbered, Snapshot

MAX_PENDING_HASHES = 1 << 16
"""Hashes kept for a gateway that reads slowly, 1 MiB; an event without any counts as one. Beyond that a snapshot is
shorter than what it has missed."""
PART_HASHES = 1 << 16
"""Hashes of a snapshot in one message."""
GATHER_SECONDS = 0.02
"""Pause after a message: the news of the steps in it go together. A router expects what it has sent anyway."""
LOAD_SECONDS = 0.1
"""How often the load is looked at while the cache is quiet."""

Send = Callable[[worker_pb2.EventBatch], Awaitable[None]]


class EventStreamClosedError(Exception):
    """The worker ends the stream."""


class EventStream:
    """Lives on the event loop, but for ``hear``."""

    def __init__(
        self,
        feed: CacheFeed,
        take_snapshot: Callable[[], Awaitable[Snapshot]],
        load: Callable[[], worker_pb2.WorkerLoad],
    ) -> None:
        """``take_snapshot`` has the feed's snapshot taken on the engine's thread."""
        self._feed = feed
        self._take_snapshot = take_snapshot
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._pending: list[Numbered] = []
        self._num_hashes = 0
        self._lost = False
        self._closing = False
        self._told: worker_pb2.WorkerLoad | None = None

    def close(self) -> None:
        """End the stream."""
        self._closing = True
        self._changed.set()

    def hear(self, events: Sequence[Numbered] | None) -> None:
        """Take what has happened, on the engine's thread."""
        self._loop.call_soon_threadsafe(self._gather, events)

    async def run(self, send: Send) -> None:
        """Send until the gateway goes. Raises EventStreamClosedError once ``close`` was called."""
        self._feed.follow(self)
        try:
            while True:
                await self._send_changes(await self._send_snapshot(send), send)
        finally:
            self._feed.leave(self)

    def _gather(self, events: Sequence[Numbered] | None) -> None:
        self._changed.set()
        if events is None:
            self._lost = True
        elif not self._lost:
            self._pending += events
            self._num_hashes += sum(1 if isinstance(event, Cleared) else len(event.hashes) for _, event in events)
            self._lost = self._num_hashes > MAX_PENDING_HASHES
        if self._lost:
            self._drop()

    def _drop(self) -> None:
        self._pending, self._num_hashes = [], 0

    async def _send_snapshot(self, send: Send) -> int:
        """Send all that can be hit. Returns the number of the last event that it holds."""
        self._lost = False
        self._drop()
        snapshot = await self._take_snapshot()
        batches = list(_parts(snapshot))
        batches[-1].snapshot = worker_pb2.SNAPSHOT_PART_LAST
        batches[0].load.CopyFrom(self._look())
        for batch in batches:
            if self._closing:
                raise EventStreamClosedError
            await send(batch)
        return snapshot.number

    async def _send_changes(self, number: int, send: Send) -> None:
        """Send what changes after an event, until the gateway has missed too much."""
        while not self._lost:
            try:
                async with asyncio.timeout(LOAD_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            if self._closing:
                raise EventStreamClosedError
            fresh = [item for item in self._pending if item[0] > number]
            self._drop()
            batch = worker_pb2.EventBatch(events=[_write(event) for _, event in fresh])
            if fresh:
                batch.first_number, number = fresh[0][0], fresh[-1][0]
            if self._load() != self._told:
                batch.load.CopyFrom(self._look())
            if batch.events or batch.HasField("load"):
                await send(batch)
                await asyncio.sleep(GATHER_SECONDS)

    def _look(self) -> worker_pb2.WorkerLoad:
        self._told = self._load()
        return self._told


def _parts(snapshot: Snapshot) -> Iterator[worker_pb2.EventBatch]:
    """Cut a snapshot into messages, at least one."""
    for start in range(0, max(1, len(snapshot.blocks)), PART_HASHES):
        blocks = snapshot.blocks[start : start + PART_HASHES]
        stored = [
            worker_pb2.TenantBlocks(tenant=tenant, hashes=b"".join(block_hash for _, block_hash in group))
            for tenant, group in groupby(blocks, key=lambda block: block[0])
        ]
        yield worker_pb2.EventBatch(
            first_number=snapshot.number,
            events=[worker_pb2.CacheEvent(stored=blocks) for blocks in stored],
            snapshot=worker_pb2.SNAPSHOT_PART_SOME,
        )


def _write(event: Event) -> worker_pb2.CacheEvent:
    if isinstance(event, Cleared):
        return worker_pb2.CacheEvent(cleared=event.tenant)
    blocks = worker_pb2.TenantBlocks(tenant=event.tenant, hashes=b"".join(event.hashes))
    if isinstance(event, Stored):
        return worker_pb2.CacheEvent(stored=blocks)
    assert isinstance(event, Removed)
    return worker_pb2.CacheEvent(flushed=blocks) if event.flushed else worker_pb2.CacheEvent(removed=blocks)
