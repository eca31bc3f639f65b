"""Prefixes that stay: blocks held by a lease with a time to live instead of by a sequence."""

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from prefixgate.cache.accounts import Account

_SPARE = 64
"""Heap entries without a pin that are not worth sweeping."""


class PinLimitError(Exception):
    """More blocks would be pinned than the pool's limit allows, with the numbers."""


@dataclass(eq=False, slots=True)
class Pin:
    """One lease on a path of published blocks."""

    pin_id: int
    """Random, in 64 bits: it tells nothing of other pins, and two caches that a client talks to have none in common."""
    account: Account
    root: int
    blocks: list[int]
    expires_at: float
    """On the clock of whoever made the pin, in seconds."""


class Pins:
    """The live pins, by id and by time of expiry. Owns no references: the cache takes and releases them.

    A path of blocks has one pin at most, which is extended instead of made again: so there are never more pins than
    pinned blocks. Expiry pops from a heap, so it costs what expires and not what is pinned. A pin that was extended or
    released early leaves its heap entry behind; where these come to outnumber the pins, they are swept away.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._pins: dict[int, Pin] = {}
        self._by_end: dict[int, Pin] = {}
        """By the last block, which stands for its path while it is held."""
        self._by_expiry: list[tuple[float, int]] = []
        self._pinned: Counter[int] = Counter()
        self._by_tenant: Counter[str] = Counter()
        """Distinct blocks of each tenant's; no block is of two tenants."""

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that are pinned."""
        return len(self._pinned)

    @property
    def next_expiry(self) -> float | None:
        """A time before which no pin expires; None where there is none to."""
        return self._by_expiry[0][0] if self._by_expiry else None

    def all(self) -> list[Pin]:
        return list(self._pins.values())

    def of(self, tenant: str) -> list[Pin]:
        """A tenant's pins."""
        return [pin for pin in self._pins.values() if pin.account.tenant == tenant]

    def num_blocks_of(self, tenant: str) -> int:
        """Distinct blocks that a tenant's pins hold; O(1)."""
        return self._by_tenant[tenant]

    def counts(self) -> Mapping[int, int]:
        """Copy how many pins hold each block that any holds."""
        return dict(self._pinned)

    def count(self, block: int) -> int:
        """How many pins hold a block."""
        return self._pinned.get(block, 0)

    def extend(self, blocks: Sequence[int], expires_at: float) -> Pin | None:
        """Let the pin of just this path end no earlier than that; None where it has none."""
        pin = self._by_end.get(blocks[-1]) if blocks else None
        if pin is not None and pin.expires_at < expires_at:
            pin.expires_at = expires_at  # its heap entry is early then, and is put back when its time comes
        return pin

    def add(self, account: Account, root: int, blocks: list[int], expires_at: float) -> Pin:
        """Register a pin. Raises PinLimitError, and registers nothing, where it would pin too many blocks."""
        new = sum(1 for block in blocks if block not in self._pinned)
        if self.num_blocks + new > self.limit:
            raise PinLimitError(f"{new} more blocks than {self.num_blocks} would be pinned; the limit is {self.limit}")
        own = self._by_tenant[account.tenant]
        if account.pin_cap is not None and own + new > account.pin_cap:
            raise PinLimitError(f"{new} more than {own} of the tenant's would be pinned; it may pin {account.pin_cap}")
        pin = Pin(secrets.randbits(64), account, root, blocks, expires_at)
        self._pins[pin.pin_id] = pin
        if blocks:
            self._by_end[blocks[-1]] = pin
        self._pinned.update(blocks)
        self._by_tenant[account.tenant] += new
        heappush(self._by_expiry, (expires_at, pin.pin_id))
        return pin

    def remove(self, pin_id: int, tenant: str) -> Pin | None:
        """Take a tenant's pin out; None where it has none of that id (any more)."""
        pin = self._pins.get(pin_id)
        if pin is None or pin.account.tenant != tenant:
            return None
        self._forget(pin)
        if len(self._by_expiry) > 2 * len(self._pins) + _SPARE:
            self._by_expiry = [(pin.expires_at, pin.pin_id) for pin in self._pins.values()]
            heapify(self._by_expiry)
        return pin

    def expired(self, now: float) -> list[Pin]:
        """Take out all pins whose time has come."""
        found = []
        while self._by_expiry and self._by_expiry[0][0] <= now:
            pin = self._pins.get(heappop(self._by_expiry)[1])
            if pin is None:
                continue
            if pin.expires_at > now:
                heappush(self._by_expiry, (pin.expires_at, pin.pin_id))
                continue
            self._forget(pin)
            found.append(pin)
        return found

    def _forget(self, pin: Pin) -> None:
        del self._pins[pin.pin_id]
        if pin.blocks:
            del self._by_end[pin.blocks[-1]]
        tenant = pin.account.tenant
        for block in pin.blocks:
            if self._pinned[block] == 1:
                del self._pinned[block]
                self._by_tenant[tenant] -= 1
            else:
                self._pinned[block] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
