"""Prefixes that stay: blocks held by a lease with a time to live instead of by a sequence."""

from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush

from prefixgate.cache.accounts import Account


class PinLimitError(Exception):
    """More blocks would be pinned than the pool's limit allows, with the numbers."""


@dataclass(eq=False, slots=True)
class Pin:
    """One lease on a path of published blocks."""

    pin_id: int
    account: Account
    root: int
    blocks: list[int]
    expires_at: float
    """On the clock of whoever made the pin, in seconds."""


class Pins:
    """The live pins, by id and by time of expiry. Owns no references: the cache takes and releases them.

    Expiry pops from a heap, so it costs what expires and not what is pinned. A pin that was released early leaves its
    heap entry behind until its time comes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._pins: dict[int, Pin] = {}
        self._by_expiry: list[tuple[float, int]] = []
        self._pinned: Counter[int] = Counter()
        self._last_id = 0

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that are pinned."""
        return len(self._pinned)

    def all(self) -> list[Pin]:
        return list(self._pins.values())

    def count(self, block: int) -> int:
        """How many pins hold a block."""
        return self._pinned.get(block, 0)

    def add(self, account: Account, root: int, blocks: list[int], expires_at: float) -> Pin:
        """Register a pin. Raises PinLimitError, and registers nothing, where it would pin too many blocks."""
        new = sum(1 for block in blocks if block not in self._pinned)
        if self.num_blocks + new > self.limit:
            raise PinLimitError(f"{new} more blocks than {self.num_blocks} would be pinned; the limit is {self.limit}")
        self._last_id += 1
        pin = Pin(self._last_id, account, root, blocks, expires_at)
        self._pins[pin.pin_id] = pin
        self._pinned.update(blocks)
        heappush(self._by_expiry, (expires_at, pin.pin_id))
        return pin

    def remove(self, pin_id: int, tenant: str) -> Pin | None:
        """Take a tenant's pin out; None where it has none of that id (any more)."""
        pin = self._pins.get(pin_id)
        if pin is None or pin.account.tenant != tenant:
            return None
        self._forget(pin)
        return pin

    def expired(self, now: float) -> list[Pin]:
        """Take out all pins whose time has come."""
        found = []
        while self._by_expiry and self._by_expiry[0][0] <= now:
            pin = self._pins.get(heappop(self._by_expiry)[1])
            if pin is not None:
                self._forget(pin)
                found.append(pin)
        return found

    def _forget(self, pin: Pin) -> None:
        del self._pins[pin.pin_id]
        for block in pin.blocks:
            if self._pinned[block] == 1:
                del self._pinned[block]
            else:
                self._pinned[block] -= 1
