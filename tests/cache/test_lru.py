"""The order of eviction, whole, with its story."""

from prefixgate.cache.prefix_cache import PrefixCache
from tests.cache.sequences import OTHER, SCOPE, make_cache, serve, serve_cached


def ids(first: int, blocks: int) -> list[int]:
    return [first * 1000 + i for i in range(blocks * 16)]


def path(cache: PrefixCache, prompt: list[int]) -> list[int]:
    return cache.match(SCOPE, [*prompt, 1]).blocks


def drain(cache: PrefixCache) -> list[int]:
    """Evict everything, one block at a time, and give the order in which the blocks left."""
    gone: list[int] = []
    while cache.stats().cached_blocks:
        before = [block for block in range(cache.num_blocks) if cache.index.is_node(block)]
        # A call that needs one block more than there is free evicts exactly one.
        admission = cache.admit(OTHER, [9] * (16 * (cache.pool.num_free + 1)), max_new_tokens=1)
        assert admission is not None
        gone += [block for block in before if not cache.index.is_node(block)]
        cache.release(admission.table, 0)
    return gone


def test_the_leaf_of_the_path_used_longest_ago_goes_first_then_its_parents() -> None:
    cache = make_cache(8)
    # Time 1: A is computed, three blocks. Time 2: B, two blocks. Time 3: A's first two blocks are used again.
    serve(cache, ids(1, 3))
    serve(cache, ids(2, 2))
    a, b = path(cache, ids(1, 3)), path(cache, ids(2, 2))
    serve(cache, [*ids(1, 2), 7])  # leaves a tail of one token under A's second block
    (tail,) = [child for child in cache.index.children(a[1]) if cache.index.is_tail(child)]
    # A's third block is oldest, as only the first two were used at time 3. Then B from its leaf up. Then the tail and
    # what is left of A, leaf first.
    assert cache.evictor.order(cache.accounts.of("tenant"))[:2] == [a[2], b[1]]
    assert drain(cache) == [a[2], b[1], b[0], tail, a[1], a[0]]


def test_a_hit_moves_the_whole_path_to_the_end_of_the_order() -> None:
    cache = make_cache(8)
    serve(cache, ids(1, 2))
    serve(cache, ids(2, 2))
    a, b = path(cache, ids(1, 2)), path(cache, ids(2, 2))
    serve(cache, ids(1, 2))  # cached to its last token: one block hit, the second copied and found to be a twin
    assert drain(cache) == [b[1], b[0], a[1], a[0]]


def test_blocks_without_content_go_before_any_cached_one() -> None:
    cache = make_cache(8)
    serve(cache, ids(1, 4))
    serve(cache, ids(2, 4))
    assert cache.stats().evictions_total == 0
    assert cache.stats().cached_blocks == 8


def test_a_chain_is_evicted_from_its_leaf_and_never_from_its_head() -> None:
    cache = make_cache(8)
    serve(cache, ids(1, 8))
    serve(cache, ids(2, 3))
    assert serve_cached(cache, [*ids(1, 5), 1]) == 80


def test_a_pool_full_of_idle_blocks_admits_a_call_that_needs_all_of_it() -> None:
    cache = make_cache(8)
    serve(cache, ids(1, 8))
    admission = serve(cache, ids(2, 8))
    assert admission.cached_tokens == 0
    assert cache.stats().evictions_total == 8


def test_the_order_stays_small_when_one_path_is_used_again_and_again() -> None:
    cache = make_cache(8)
    for _ in range(1000):
        serve(cache, ids(1, 2))
    assert cache.stats().cached_blocks == 2
