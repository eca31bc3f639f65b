"""How long what is evicted had lain idle."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.cache.adaptive import AdaptivePolicy
from prefixgate.cache.events import Removed
from prefixgate.cache.eviction import EvictionPolicy
from prefixgate.cache.hashing import BlockHasher
from prefixgate.cache.idle_times import IdleTimes
from prefixgate.cache.lru import LRUPolicy
from prefixgate.cache.prefix_cache import PrefixCache
from tests.cache.sequences import KEY, SCOPE, serve

BLOCK = 2
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=3)
"""Which of two contents each block of a prompt has, so that prompts share beginnings."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_chain_counts_from_its_last_use_and_hands_that_on() -> None:
    clock = Clock()
    times = IdleTimes(8, clock)
    times.used(1)
    clock.now = 110.0
    times.used(3)
    clock.now = 120.0
    times.used(2)
    clock.now = 125.0
    # 3 below 2 below 1: the leaf was used 15 s ago, the block above it 5 s, and with that the one above both.
    times.evicted([3, 2], 1)
    assert times.evicted_seconds_total == 15 + 5
    times.evicted([1], 8)
    assert times.evicted_seconds_total == 15 + 5 + 5


@pytest.mark.parametrize("policy", [LRUPolicy, AdaptivePolicy])
@given(calls=st.lists(st.tuples(PROMPTS, st.integers(0, 9)), max_size=40))
def test_each_evicted_block_counts_the_time_since_any_call_used_it(
    policy: Callable[[int, Callable[[int], bool]], EvictionPolicy], calls: list[tuple[list[int], int]]
) -> None:
    clock = Clock()
    hasher = BlockHasher(KEY, block_size=BLOCK)
    cache = PrefixCache(5, hasher, policy=policy, clock=clock)
    used_at: dict[bytes, float] = {}
    expected, last = 0.0, cache.events.last
    for contents, pause in calls:
        clock.now += pause
        ids = [10 * content + offset for content in contents for offset in range(BLOCK)]
        serve(cache, ids)
        for _, event in cache.events.since(last):
            if isinstance(event, Removed):
                expected += sum(clock.now - used_at.pop(name) for name in event.hashes)
        last = cache.events.last
        used_at |= dict.fromkeys(cache.prompt(SCOPE, ids).hashes, clock.now)
    assert cache.stats().evicted_idle_seconds_total == pytest.approx(expected)
