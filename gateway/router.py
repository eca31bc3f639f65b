"""Which worker a call goes to: what is cached there against what there is to do, in seconds.

The cost of a worker is

    wait + (miss_weight + eviction_weight * pressure) * miss

    wait = pending tokens / speed + calls * call_seconds
    miss = prompt tokens not cached there / speed

and the call goes to the least. The wait is the caller's own; what is computed delays others too, so ``miss_weight`` is
more than 1, and it takes room from what is cached, which costs most where the pool turns over fastest: ``pressure`` is
1 for a worker whose pool does as all do, 0 where nothing is evicted. Without it a fleet with little to do would send
all that begins alike to one worker, and use one pool.

It is one decision for each call: there is no threshold beyond which affinity is switched off, and no session that is
tied to a worker.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median_low

from xxhash import xxh3_64_intdigest

from prefixgate.cache.hashing import BlockHash, BlockHasher, CacheScope
from prefixgate.config.routing_settings import RoutingSettings
from prefixgate.gateway.candidate import Candidate, Choice
from prefixgate.gateway.predictions import Predictions
from prefixgate.gateway.prefill_speed import PrefillSpeed
from prefixgate.gateway.routing_index import Prefix, RoutingIndex

_EXPECT_SECONDS = 5.0
"""How long the worker may take to say what it stored, beyond the time in which the prompt should be computed."""
_SAME_SPEED = 1.5
"""Workers whose speeds differ by less count as equally fast: else all that is new would go to the fastest by a hair."""


class PrefixRouter:
    """Chooses workers by blocks really held. Pure and synchronous; lives on the event loop.

    Whoever hears of workers tells ``index`` what they hold and calls ``forget`` for those that are lost. Each call is
    one ``choose``, among the candidates that are fit for it (not ejected, not draining, not tried before); when it
    ends with a usage, ``observe`` learns the worker's speed from it.
    """

    def __init__(
        self,
        hasher: BlockHasher,
        settings: RoutingSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``hasher`` has the key of the workers: with another, no prompt would be found anywhere."""
        self._hasher = hasher
        self._settings = settings
        self._clock = clock
        self._predictions = Predictions(clock)
        self._speeds: dict[str, PrefillSpeed] = {}
        self.index = RoutingIndex(self._predictions)

    def choose(
        self,
        scope: CacheScope,
        token_ids: Sequence[int],
        candidates: Sequence[Candidate],
        *,
        reads_cache: bool = True,
        keeps_blocks: bool = True,
        hashes: Sequence[BlockHash] | None = None,
    ) -> Choice:
        """Choose one of at least one candidates for a prompt, and expect its blocks there from now on.

        ``reads_cache`` and ``keeps_blocks`` say what the call's cache mode allows; ``hashes`` are those of ``names``,
        where they are at hand.
        """
        if not (reads_cache or keeps_blocks):
            hashes = []
        elif hashes is None:
            hashes = self.names(scope, token_ids)
        return self.choose_by_hashes(
            scope.tenant,
            hashes,
            len(token_ids),
            candidates,
            reads_cache=reads_cache,
            keeps_blocks=keeps_blocks,
        )

    def names(self, scope: CacheScope, token_ids: Sequence[int]) -> list[BlockHash]:
        """Name the whole blocks of a prompt. Can be called from any thread: it takes milliseconds for a long one."""
        return self._hasher.hash_tokens(scope, token_ids)

    def choose_by_hashes(
        self,
        tenant: str,
        hashes: Sequence[BlockHash],
        prompt_tokens: int,
        candidates: Sequence[Candidate],
        *,
        reads_cache: bool = True,
        keeps_blocks: bool = True,
    ) -> Choice:
        """Do the same for a prompt whose whole blocks are hashed already."""
        now, settings = self._clock(), self._settings
        names = [candidate.worker for candidate in candidates]
        prefixes = {name: self.index.prefix(name, tenant, hashes) for name in {*names, *self.index.workers()}}
        reusable = max(prefix.expected for prefix in prefixes.values()) if reads_cache else 0
        # Equal prompts that nobody knows are equal here too, so a burst of them meets; what is new below a shared
        # head is spread.
        key = hashes[min(reusable, len(hashes) - 1)] if hashes else tenant.encode()
        speeds, pressures = self._speeds_of(names, now), self.index.pressures(names)

        def cost(candidate: Candidate) -> tuple[float, int, int]:
            worker, calls, pending = candidate
            speed = speeds[worker]
            cached = self._tokens(prefixes[worker], prompt_tokens) if reads_cache else 0
            wait = pending.left(now, speed) / speed + calls * settings.call_seconds
            weight = settings.miss_weight + settings.eviction_weight * pressures[worker]
            miss = (prompt_tokens - cached) / speed
            return wait + weight * miss, calls, xxh3_64_intdigest(key + worker.encode())

        chosen = min(candidates, key=cost)
        prefix = prefixes[chosen.worker]
        cached = self._tokens(prefix, prompt_tokens) if reads_cache else 0
        if keeps_blocks:
            speed = speeds[chosen.worker]
            seconds = (chosen.pending.left(now, speed) + prompt_tokens - cached) / speed
            self._predictions.add(chosen.worker, tenant, hashes[prefix.held :], seconds + _EXPECT_SECONDS)
        reusable_tokens = min(reusable * self._hasher.block_size, prompt_tokens - 1)
        return Choice(chosen.worker, prompt_tokens if reads_cache else 0, reusable_tokens, cached)

    def observe(self, worker: str, computed_tokens: int, seconds: float) -> None:
        """Learn from a call: how much of its prompt the worker computed, and the time from admission to first token."""
        now = self._clock()
        speed = self._speeds.get(worker)
        if speed is None:
            speed = self._speeds[worker] = PrefillSpeed(self._settings.prefill_tokens_per_second, now)
        speed.observe(computed_tokens, seconds, now)

    def forget(self, worker: str) -> None:
        """Drop all that is known of a worker: it is lost."""
        self.index.forget(worker)
        self._speeds.pop(worker, None)

    def _tokens(self, prefix: Prefix, prompt_tokens: int) -> int:
        # The last token is always computed.
        return min(prefix.expected * self._hasher.block_size, prompt_tokens - 1)

    def _speeds_of(self, workers: Sequence[str], now: float) -> dict[str, float]:
        seen = {name: self._speeds[name].tokens_per_second(now) for name in workers if name in self._speeds}
        speeds = {name: seen.get(name, self._settings.prefill_tokens_per_second) for name in workers}
        usual = median_low(speeds.values())
        return {
            name: usual if usual / _SAME_SPEED < speed < usual * _SAME_SPEED else speed
            for name, speed in speeds.items()
        }
