"""What the cache gains and loses, handed from the engine's thread to those who follow it."""

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from prefixgate.cache.events import Event, Gap
from prefixgate.cache.hashing import BlockHash
from prefixgate.cache.prefix_cache import PrefixCache

logger = logging.getLogger(__name__)

Numbered = tuple[int, Event]
"""An event and its number."""


class Snapshot(NamedTuple):
    """All that can be hit, as of an event."""

    number: int
    blocks: list[tuple[str, BlockHash]]
    """Tenant and hash, parents before their children."""


class Follower(Protocol):
    """Hears of the cache on the engine's thread: it must hand the news on and return."""

    def hear(self, events: Sequence[Numbered] | None) -> None:
        """Take what has happened since the last time, in order and without a gap; None where too much has."""


class CacheFeed:
    """Publishes a cache's events after each step, for the cost of a comparison while nobody follows.

    Whoever begins to follow takes a snapshot after that, and passes over what the snapshot holds already.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._published = cache.events.last
        # Replaced as a whole on the event loop, and only read by the engine's thread.
        self._followers: tuple[Follower, ...] = ()

    # On the event loop

    def follow(self, follower: Follower) -> None:
        """Let somebody hear of what comes."""
        self._followers = (*self._followers, follower)

    def leave(self, follower: Follower) -> None:
        """Let them hear no more; nothing for one that does not follow."""
        self._followers = tuple(other for other in self._followers if other is not follower)

    # On the engine's thread

    def publish(self) -> None:
        """Tell what has happened since the last time. Raises nothing: who listens must not hurt who computes."""
        since, self._published = self._published, self._cache.events.last
        if since == self._published or not self._followers:
            return
        try:
            events = self._cache.events.since(since)
        except Gap:
            events = None
        for follower in self._followers:
            try:
                follower.hear(events)
            except Exception:
                logger.exception("A follower of the cache failed")

    def snapshot(self) -> Snapshot:
        """Take all that can be hit now; O(blocks)."""
        return Snapshot(self._cache.events.last, self._cache.snapshot())
