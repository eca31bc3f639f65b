"""What the index gained and lost, in order, for routers that keep a picture of it."""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from prefixgate.cache.hashing import BlockHash


class Stored(NamedTuple):
    """Blocks that can be hit now: a chain under ``parent`` (the root hash for first blocks)."""

    tenant: str
    parent: BlockHash
    hashes: tuple[BlockHash, ...]


class Removed(NamedTuple):
    """Blocks that can no longer be hit. Each hash has one block, so this is always the last copy."""

    tenant: str
    hashes: tuple[BlockHash, ...]
    flushed: bool = False
    """Whether their tenant wanted that. Else the room was needed, which tells how full the pool is."""


class Cleared(NamedTuple):
    """All blocks of a tenant were flushed; of every tenant where it is empty."""

    tenant: str


Event = Stored | Removed | Cleared


class Gap(Exception):
    """Events were asked for that are no longer kept: take a snapshot and go on from its number."""


class EventLog:
    """The last events, numbered from 1 without gaps within one incarnation.

    Bounded: a reader that falls further behind than ``capacity`` events is told so and takes a snapshot. Hashes are
    keyed, so they tell a reader nothing without the key; token ids are not part of an event.
    """

    def __init__(self, incarnation: str, *, capacity: int = 10_000) -> None:
        self.incarnation = incarnation
        self.last = 0
        self._events: deque[Event] = deque(maxlen=capacity)

    def stored(self, tenant: str, parent: BlockHash, hashes: Sequence[BlockHash]) -> None:
        self.last += 1
        self._events.append(Stored(tenant, parent, tuple(hashes)))

    def removed(self, tenant: str, hashes: Sequence[BlockHash], *, flushed: bool = False) -> None:
        if hashes:
            self.last += 1
            self._events.append(Removed(tenant, tuple(hashes), flushed))

    def cleared(self, tenant: str = "") -> None:
        self.last += 1
        self._events.append(Cleared(tenant))

    def since(self, number: int) -> list[tuple[int, Event]]:
        """Events after ``number``, each with its own. Raises Gap where the first of them is gone."""
        first = self.last - len(self._events) + 1
        if number + 1 < first or number > self.last:
            raise Gap(f"events {first} to {self.last} are kept; {number + 1} was asked for")
        # From the end, where readers are that keep up: the whole log would cost each step a walk over 10,000 events.
        events = list(islice(reversed(self._events), self.last - number))
        return list(zip(range(number + 1, self.last + 1), reversed(events), strict=True))
