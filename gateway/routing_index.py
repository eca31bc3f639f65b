"""Which worker holds which blocks, as far as the gateway has been told."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import islice
from math import ceil
from typing import NamedTuple

from prefixgate.cache.hashing import BlockHash
from prefixgate.gateway.predictions import Predictions

_NOTHING: frozenset[BlockHash] = frozenset()


class Stored(NamedTuple):
    """Blocks that can be hit now."""

    tenant: str
    hashes: Sequence[BlockHash]


class Removed(NamedTuple):
    """Blocks that can no longer be hit."""

    tenant: str
    hashes: Sequence[BlockHash]
    flushed: bool = False
    """Whether their tenant wanted that, and not the pool the room."""


class Cleared(NamedTuple):
    """All blocks of a tenant went; of every tenant where it is empty."""

    tenant: str


Event = Stored | Removed | Cleared


class Prefix(NamedTuple):
    """How much of a prompt a worker has, in blocks."""

    held: int
    """Leading blocks that it holds."""
    expected: int
    """The same, with those that it will hold soon: never fewer."""


class _Picture:
    """One worker's blocks, right up to one event of one life of it."""

    def __init__(self, incarnation: str, number: int, held: Mapping[str, Iterable[BlockHash]]) -> None:
        self.incarnation = incarnation
        self.number = number
        self.held = {tenant: set(hashes) for tenant, hashes in held.items()}
        self.num_blocks = sum(map(len, self.held.values()))
        self.evicted = 0.0
        """Blocks evicted lately, see ``RoutingIndex.pressures``."""

    def store(self, tenant: str, hashes: Sequence[BlockHash]) -> None:
        held = self.held.setdefault(tenant, set())
        self.num_blocks -= len(held)
        held.update(hashes)
        self.num_blocks += len(held)

    def remove(self, tenant: str, hashes: Sequence[BlockHash], *, flushed: bool) -> None:
        held = self.held.get(tenant, set())
        self.num_blocks -= len(held)
        held.difference_update(hashes)
        self.num_blocks += len(held)
        self.evicted += 0 if flushed else len(hashes)
        if not held:
            self.held.pop(tenant, None)

    def clear(self, tenant: str) -> None:
        for name in [tenant] if tenant else list(self.held):
            self.num_blocks -= len(self.held.pop(name, ()))


class RoutingIndex:
    """Each worker's blocks, from a snapshot and the numbered events after it, and what it will hold soon.

    A worker's picture is right or it is not there: a number that is missing or another incarnation drops all of it,
    until the next snapshot. Nothing that is wrong here can make an answer wrong, it only costs hits.

    A set for each worker, not a map from hash to workers: a worker that is lost is dropped in one step, whatever it
    held. A set takes no more room, since most blocks are held by one worker.
    """

    def __init__(self, predictions: Predictions) -> None:
        self._pictures: dict[str, _Picture] = {}
        self._predictions = predictions

    def snapshot(self, worker: str, incarnation: str, number: int, held: Mapping[str, Iterable[BlockHash]]) -> None:
        """Take a worker's whole picture: its blocks by tenant, as they were right after event ``number``."""
        self._pictures[worker] = _Picture(incarnation, number, held)

    def apply(self, worker: str, incarnation: str, number: int, event: Event) -> bool:
        """Take one event. Returns False where it does not follow what is known: then a snapshot is needed.

        Events that the picture holds already, repeated or older than the snapshot, change nothing.
        """
        picture = self._pictures.get(worker)
        if picture is None:
            return False
        if picture.incarnation != incarnation or number > picture.number + 1:
            self.forget(worker)
            return False
        if number == picture.number + 1:
            picture.number = number
            self._change(worker, picture, event)
        return True

    def forget(self, worker: str) -> None:
        """Drop all that is known and expected of a worker: it is lost, or lives anew."""
        self._pictures.pop(worker, None)
        self._predictions.forget(worker)

    def workers(self) -> Iterable[str]:
        """The workers whose pictures are there."""
        return self._pictures.keys()

    def num_blocks(self, worker: str) -> int:
        """Blocks that a worker is known to hold."""
        picture = self._pictures.get(worker)
        return picture.num_blocks if picture is not None else 0

    def overlap(self, one: str, other: str, looks: int) -> int:
        """Tell how many blocks two workers are both known to hold; where that would take more looks, about how many.

        What is looked for is then a sample: sets are in the order of hashes, which is none.
        """
        mine, theirs = self._pictures.get(one), self._pictures.get(other)
        if mine is None or theirs is None:
            return 0
        fewer, more = sorted((mine, theirs), key=lambda picture: picture.num_blocks)
        part = min(1.0, looks / max(1, fewer.num_blocks))
        shared = 0.0
        for tenant, blocks in fewer.held.items():
            sample = set(islice(blocks, ceil(part * len(blocks))))
            found = len(sample & more.held.get(tenant, _NOTHING))
            shared += found * len(blocks) / max(1, len(sample))
        return round(shared)

    def pressures(self, workers: Sequence[str]) -> dict[str, float]:
        """Tell how much faster than usual each worker's pool turns over: 1 is the mean of these workers.

        A pool's turnover is what it evicted lately, for each block that it holds. *Lately* is not a matter of time: the
        counts are halved whenever they add up to the number of blocks held. Where nothing is evicted all are 0.
        """
        turnovers = {}
        for name in workers:
            picture = self._pictures.get(name)
            turnovers[name] = picture.evicted / max(1, picture.num_blocks) if picture is not None else 0.0
        mean = sum(turnovers.values()) / max(1, len(turnovers))
        return {name: turnover / mean if mean else 0.0 for name, turnover in turnovers.items()}

    def prefix(self, worker: str, tenant: str, hashes: Sequence[BlockHash]) -> "Prefix":
        """Tell how many of a prompt's leading blocks a worker holds, and will hold soon.

        By bisection, since a worker holds a block only with all that come before it: it evicts leaves, and stores
        children after their parents. Where events were wrong about that, this is wrong too.
        """
        picture, expects = self._pictures.get(worker), self._predictions.has
        held: Set[BlockHash] = picture.held.get(tenant, _NOTHING) if picture is not None else _NOTHING
        now = bisect_left(hashes, True, key=lambda block_hash: block_hash not in held)
        soon = bisect_left(
            hashes,
            True,
            lo=now,
            key=lambda block_hash: block_hash not in held and not expects(worker, tenant, block_hash),
        )
        return Prefix(now, soon)

    def _change(self, worker: str, picture: _Picture, event: Event) -> None:
        if isinstance(event, Cleared):
            picture.clear(event.tenant)
            # Only its own: what one tenant flushes must not cost others their hits.
            self._predictions.forget(worker, event.tenant)
            return
        self._predictions.confirm(worker, event.tenant, event.hashes)
        if isinstance(event, Stored):
            picture.store(event.tenant, event.hashes)
            return
        picture.remove(event.tenant, event.hashes, flushed=event.flushed)
        pictures = self._pictures.values()
        if sum(one.evicted for one in pictures) > sum(one.num_blocks for one in pictures):
            for one in pictures:
                one.evicted /= 2
