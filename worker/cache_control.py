"""What a tenant may ask of the cache itself: where a prompt leaves it, what stays, what goes, and how it stands.

Nothing here tells one tenant of another: not what others hold, and not how much. Runs on the engine's thread.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from grpc import StatusCode

from prefixgate.cache.hashing import CacheScope
from prefixgate.cache.matching import Explanation
from prefixgate.cache.pins import Pin, PinLimitError
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.request import RefusedError
from prefixgate.worker.scheduler import Scheduler


class PinnedPrefix(NamedTuple):
    """A pin as its tenant sees it."""

    pin_id: int
    salt: str
    tokens: int
    expires_in_seconds: float


class Flushed(NamedTuple):
    """What a flush did."""

    freed_blocks: int
    ended_pins: int


class Standing(NamedTuple):
    """How one tenant stands."""

    active_blocks: int
    cached_blocks: int
    floor_blocks: int
    cap_blocks: int
    """The pool's size where none is configured."""
    running_calls: int
    waiting_calls: int
    pins: int
    pinned_blocks: int


class CacheControl:
    """Answers for one tenant at a time."""

    def __init__(self, cache: PrefixCache, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._clock = clock

    def explain(self, scope: CacheScope, token_ids: Sequence[int]) -> Explanation:
        """Tell where a prompt leaves the cache and why."""
        return self._cache.explain(scope, token_ids)

    def pin(self, scope: CacheScope, token_ids: Sequence[int], ttl_seconds: float) -> PinnedPrefix:
        """Keep what is cached of a prompt. Raises RefusedError where that is nothing, or too much."""
        size, limit = self._cache.block_size, self._cache.pins.limit
        try:
            pin = self._cache.pin(scope, token_ids, expires_at=self._clock() + ttl_seconds)
        except PinLimitError:
            blocks = len(self._cache.match(scope, token_ids).blocks)
            most = self._cache.accounts.view(scope.tenant).pin_cap
            own = "" if most is None else f", and the tenant's own {most}"
            raise RefusedError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"the prompt's {blocks} cached blocks of {size} tokens cannot be pinned beside what is pinned and in "
                f"use: of this worker's {self._cache.num_blocks} blocks all pins together may hold {limit}{own}",
            ) from None
        if not pin.blocks:
            self._cache.unpin(scope.tenant, pin.pin_id)
            raise RefusedError(
                StatusCode.FAILED_PRECONDITION,
                f"none of the prompt's {len(token_ids) // size} whole blocks of {size} tokens is cached; warm it first",
            )
        return self._seen(pin)

    def keep(self, scope: CacheScope, token_ids: Sequence[int], ttl_seconds: float) -> int:
        """Pin a prompt if that can be. Returns how many of its tokens are pinned."""
        try:
            return self.pin(scope, token_ids, ttl_seconds).tokens
        except RefusedError:
            return 0

    def unpin(self, tenant: str, pin_id: int | None) -> None:
        """End a pin. Raises RefusedError where the tenant has none of that id."""
        if pin_id is None or not self._cache.unpin(tenant, pin_id):
            raise RefusedError(StatusCode.NOT_FOUND, "pin_id: there is no such pin", field="pin_id")

    def pins(self, tenant: str) -> list[PinnedPrefix]:
        """The tenant's pins, soonest to end first."""
        return [self._seen(pin) for pin in sorted(self._cache.pins.of(tenant), key=lambda pin: pin.expires_at)]

    def flush(self, tenant: str, salt: str | None) -> Flushed:
        """Forget what is cached under one salt or under all, and end the pins on it."""
        pins = [pin for pin in self._cache.pins.of(tenant) if salt is None or self._scope(pin).salt == salt]
        # Before the flush, which frees only what nobody holds.
        for pin in pins:
            self._cache.unpin(tenant, pin.pin_id)
        return Flushed(self._cache.flush(tenant, salt), len(pins))

    def standing(self, tenant: str) -> Standing:
        """Tell what the tenant holds and has under way."""
        account = self._cache.accounts.view(tenant)
        calls = [request for request in self._scheduler.calls() if request.scope.tenant == tenant]
        running = sum(request in self._scheduler.running for request in calls)
        return Standing(
            active_blocks=account.active,
            cached_blocks=account.cached,
            floor_blocks=account.floor,
            cap_blocks=account.cap,
            running_calls=running,
            waiting_calls=len(calls) - running,
            pins=len(self._cache.pins.of(tenant)),
            pinned_blocks=self._cache.pins.num_blocks_of(tenant),
        )

    def _seen(self, pin: Pin) -> PinnedPrefix:
        tokens = len(pin.blocks) * self._cache.block_size
        return PinnedPrefix(pin.pin_id, self._scope(pin).salt, tokens, max(0.0, pin.expires_at - self._clock()))

    def _scope(self, pin: Pin) -> CacheScope:
        return self._cache.index.scope_of(pin.root)
