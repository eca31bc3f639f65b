"""What one worker says of its cache and its load, as the router is to know it."""

import asyncio
import logging
from collections.abc import Callable

import grpc.aio

from prefixgate.cache.hashing import BlockHash
from prefixgate.gateway.backoff import Backoff
from prefixgate.gateway.router import PrefixRouter
from prefixgate.gateway.routing_index import Cleared, Event, Removed, Stored
from prefixgate.proto import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

_HASH_BYTES = 16


class LostTrackError(Exception):
    """What came does not follow what came before."""


class WorkerEvents:
    """Follows a worker's events for as long as it lives. Nothing that goes wrong here fails a call."""

    def __init__(
        self,
        address: str,
        router: PrefixRouter,
        on_change: Callable[[], None],
        backoff: Backoff = Backoff(),  # noqa: B008  # immutable
    ) -> None:
        """``on_change`` is called when the worker begins or ceases to drain."""
        self.load = worker_pb2.WorkerLoad()
        """What it has to do, as it last said."""
        self.num_resyncs = 0
        """Snapshots that were taken because something was missed, or the stream broke."""
        self.num_blocks = 0
        """Blocks that it is known to hold."""
        self._address = address
        self._router = router
        self._on_change = on_change
        self._backoff = backoff
        self._complaint = ""

    async def run(self, stub: "worker_pb2_grpc.WorkerAsyncStub", incarnation: str) -> None:
        """Follow one life of the worker until cancelled, by another stream whenever one ends."""
        request, attempt = worker_pb2.EventsRequest(incarnation=incarnation), 0
        while True:
            picture, stream = _Snapshot(), stub.Events(request)
            try:
                async for batch in stream:
                    self._take(batch, incarnation, picture)
                    attempt = 0
                self._complain("the stream of its events ended")
            except LostTrackError as error:
                self._complain(str(error))
            except grpc.aio.AioRpcError as error:
                self._complain(f"the stream of its events ended with {error.code().name}: {error.details()}")
            except Exception:
                logger.exception("The events of the worker at %s cannot be followed", self._address)
            finally:
                stream.cancel()
            self._router.index.forget(self._address)
            self.num_blocks = 0
            await asyncio.sleep(self._backoff.delay(attempt))
            attempt += 1
            self.num_resyncs += 1

    def forget(self) -> None:
        """Drop all that is known of the worker: it is lost, and if it comes back it lives anew."""
        self._router.forget(self._address)
        self.num_blocks = 0
        self.load = worker_pb2.WorkerLoad()
        self._complaint = ""

    def _take(self, batch: worker_pb2.EventBatch, incarnation: str, picture: "_Snapshot") -> None:
        self._take_load(batch)
        if batch.snapshot == worker_pb2.SNAPSHOT_PART_NONE:
            for number, event in enumerate(batch.events, start=batch.first_number):
                if not self._router.index.apply(self._address, incarnation, number, _read(event)):
                    raise LostTrackError(f"event {number} does not follow what is known of its cache")
        else:
            picture.add(batch)
            if batch.snapshot == worker_pb2.SNAPSHOT_PART_LAST:
                self._router.index.snapshot(self._address, incarnation, batch.first_number, picture.take())
        self.num_blocks = self._router.index.num_blocks(self._address)

    def _take_load(self, batch: worker_pb2.EventBatch) -> None:
        if batch.HasField("load"):
            was_draining, self.load = self.load.draining, batch.load
            if self.load.draining != was_draining:
                self._on_change()

    def _complain(self, complaint: str) -> None:
        # Once for each reason, not once for each attempt.
        if complaint != self._complaint:
            logger.warning("Worker %s: %s; calls go there without knowing what it holds", self._address, complaint)
            self._complaint = complaint


class _Snapshot:
    """A snapshot as its parts come in."""

    def __init__(self) -> None:
        self._held: dict[str, list[BlockHash]] = {}

    def add(self, batch: worker_pb2.EventBatch) -> None:
        for event in batch.events:
            self._held.setdefault(event.stored.tenant, []).extend(_split(event.stored.hashes))

    def take(self) -> dict[str, list[BlockHash]]:
        held, self._held = self._held, {}
        return held


def _read(event: worker_pb2.CacheEvent) -> Event:
    match event.WhichOneof("event"):
        case "stored":
            return Stored(event.stored.tenant, _split(event.stored.hashes))
        case "removed":
            return Removed(event.removed.tenant, _split(event.removed.hashes))
        case "flushed":
            return Removed(event.flushed.tenant, _split(event.flushed.hashes), flushed=True)
        case "cleared":
            return Cleared(event.cleared)
    raise LostTrackError("an event of a kind that is not known here")


def _split(hashes: bytes) -> list[BlockHash]:
    return [BlockHash(hashes[at : at + _HASH_BYTES]) for at in range(0, len(hashes), _HASH_BYTES)]
