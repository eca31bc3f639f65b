"""The policy that learns how long content stays away."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.cache.adaptive import AdaptivePolicy
from prefixgate.cache.hashing import BlockHasher
from prefixgate.cache.lru import LRUPolicy
from prefixgate.cache.prefix_cache import PrefixCache
from tests.cache.sequences import KEY, SCOPE, serve, serve_cached

Path = list[int]


def make_cache(blocks: int, policy: type[AdaptivePolicy] | type[LRUPolicy] = AdaptivePolicy) -> PrefixCache:
    return PrefixCache(blocks, BlockHasher(KEY), policy=policy)


def path(number: int, blocks: int) -> Path:
    return [number * 1000 + i for i in range(16 * blocks)]


def order(cache: PrefixCache) -> list[int]:
    return cache.evictor.order(cache.accounts.of("tenant"))


def hit_blocks(policy: type[AdaptivePolicy] | type[LRUPolicy], paths: Iterable[Path], blocks: int) -> int:
    """Serve paths one after the other; count the blocks that hit. The last token is never cached."""
    cache, hits = make_cache(blocks, policy), 0
    for tokens in paths:
        admission = cache.admit(SCOPE, [*tokens, 1], max_new_tokens=1)
        assert admission is not None
        cache.release(admission.table, len(tokens))
        hits += admission.block_hit_tokens // 16
    return hits


def test_a_loop_larger_than_the_pool_keeps_a_part_of_itself() -> None:
    # 40 paths in turn, room for 30: LRU evicts each just before its turn.
    loop = [path(number % 40, 4) for number in range(3000)]
    assert hit_blocks(LRUPolicy, loop, 121) == 0
    assert hit_blocks(AdaptivePolicy, loop, 121) > 0.5 * 4 * len(loop)


def test_a_flood_of_prompts_seen_once_does_not_push_out_what_returns() -> None:
    choice = random.Random(1)
    paths = [path(choice.randrange(30), 4) if choice.random() < 0.5 else path(100 + n, 4) for n in range(3000)]
    assert hit_blocks(AdaptivePolicy, paths, 121) > 1.1 * hit_blocks(LRUPolicy, paths, 121)


@pytest.mark.parametrize("blocks", [41, 81, 161])
def test_where_recency_is_all_there_is_it_loses_next_to_nothing(blocks: int) -> None:
    choice = random.Random(2)
    paths = [path(max(0, n // 3 - int(choice.paretovariate(0.7))) % 500, 4) for n in range(3000)]
    asked = 4 * len(paths)
    assert hit_blocks(AdaptivePolicy, paths, blocks) > hit_blocks(LRUPolicy, paths, blocks) - 0.005 * asked


def test_what_was_learned_and_then_misleads_is_unlearned() -> None:
    # A loop larger than the pool teaches that the young should go; then each path is used again within a few uses.
    loop = [path(number % 40, 4) for number in range(1000)]
    choice = random.Random(3)
    pairs = [path(100 + n // 2 - choice.randrange(3), 4) for n in range(4000)]
    alone = hit_blocks(LRUPolicy, pairs, 121)
    gained = hit_blocks(AdaptivePolicy, loop, 121)
    assert hit_blocks(AdaptivePolicy, [*loop, *pairs], 121) > gained + alone - 0.02 * 4 * len(pairs)


def test_an_interval_that_ended_after_eviction_is_seen() -> None:
    cache = make_cache(9)
    policy = cache.evictor.policy
    assert isinstance(policy, AdaptivePolicy)
    for turn in range(1, 400):
        serve_cached(cache, path(turn % 4, 4))  # two of four paths fit
    near, far = policy.intervals.worth[0][4], policy.intervals.worth[0][12]
    assert near > 2 * far  # each comes back after four uses, evicted or not


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(st.lists(tokens, min_size=1, max_size=60))
def test_before_anything_was_learned_the_order_is_that_of_lru(calls: list[list[int]]) -> None:
    orders = []
    for policy in (LRUPolicy, AdaptivePolicy):
        cache = PrefixCache(400, BlockHasher(KEY, block_size=2), policy=policy)
        for token_ids in calls:
            serve(cache, token_ids)
        orders.append(order(cache))
    assert orders[0] == orders[1]


@given(st.lists(tokens, min_size=1, max_size=40), st.integers(6, 14))
def test_the_order_holds_each_evictable_block_once_whatever_forks_ends_and_returns(
    calls: list[list[int]], blocks: int
) -> None:
    cache = PrefixCache(blocks, BlockHasher(KEY, block_size=2), policy=AdaptivePolicy)
    for token_ids in calls:
        admission = cache.admit(SCOPE, token_ids, max_new_tokens=1)
        assert admission is not None
        cache.run_plan(lambda plan: None)
        cache.release(admission.table, len(token_ids))
        cache.check_integrity()
        assert len(order(cache)) == len(set(order(cache)))


@given(st.lists(tokens, min_size=1, max_size=40))
def test_all_that_is_cached_can_be_evicted(calls: list[list[int]]) -> None:
    cache = PrefixCache(12, BlockHasher(KEY, block_size=2), policy=AdaptivePolicy)
    for token_ids in calls:
        admission = cache.admit(SCOPE, token_ids, max_new_tokens=1)
        assert admission is not None
        cache.run_plan(lambda plan: None)
        cache.release(admission.table, len(token_ids))
    everything = cache.admit(SCOPE, [7] * 24, max_new_tokens=1)
    assert everything is not None
    assert cache.stats().cached_blocks == 0
