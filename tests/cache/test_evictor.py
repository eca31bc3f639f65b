"""Whose blocks go: floors, caps, retention."""

from prefixgate.cache.accounts import TenantShare
from prefixgate.cache.admission import CacheMode
from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache
from tests.cache.sequences import KEY, OTHER, SCOPE, admit, make_cache, prefill, serve, take_plan


def cache_of(blocks: int, **shares: TenantShare) -> PrefixCache:
    return PrefixCache(blocks, BlockHasher(KEY), shares=shares)


def ids(blocks: int, first: int) -> list[int]:
    return [first * 1000 + i for i in range(blocks * 16)]


def held(cache: PrefixCache, tenant: str) -> int:
    return cache.accounts.of(tenant).held


def test_a_flood_of_unique_prompts_never_evicts_another_tenant_below_its_floor() -> None:
    cache = cache_of(20, tenant=TenantShare(floor=6))
    serve(cache, ids(8, 1))
    for number in range(100):
        serve(cache, ids(4, 100 + number), scope=OTHER)
        assert held(cache, "tenant") >= 6
    assert cache.match(SCOPE, [*ids(8, 1), 1]).cached_tokens == 6 * 16


def test_without_a_floor_the_same_flood_takes_everything() -> None:
    cache = cache_of(20)
    serve(cache, ids(8, 1))
    for number in range(100):
        serve(cache, ids(4, 100 + number), scope=OTHER)
    assert held(cache, "tenant") == 0


def test_a_tenant_at_its_cap_evicts_its_own_and_leaves_the_free_blocks() -> None:
    cache = cache_of(20, tenant=TenantShare(cap=6))
    serve(cache, ids(5, 9), scope=OTHER)
    for number in range(10):
        serve(cache, ids(4, number))
        assert held(cache, "tenant") <= 6
    assert held(cache, "other") == 5
    assert cache.pool.num_free >= 9


def test_a_tenant_below_its_floor_takes_from_those_above_theirs() -> None:
    cache = cache_of(12, tenant=TenantShare(floor=6))
    serve(cache, ids(6, 1), scope=OTHER)
    admission = admit(cache, ids(6, 2))
    assert admission.cached_tokens == 0
    assert held(cache, "tenant") == 6


def test_room_for_a_floor_is_kept_while_the_floor_is_not_used() -> None:
    cache = cache_of(12, tenant=TenantShare(floor=6))
    assert cache.ceiling("other") == 6
    assert admit(cache, ids(6, 1), scope=OTHER)
    assert cache.admit(OTHER, ids(1, 3), max_new_tokens=1) is None
    assert admit(cache, ids(6, 2))


def test_among_tenants_the_path_used_longest_ago_goes_first() -> None:
    cache = cache_of(8)
    serve(cache, ids(3, 1))
    serve(cache, ids(3, 2), scope=OTHER)
    serve(cache, ids(4, 3), scope=CacheScope("third", "model@1"))
    assert (held(cache, "tenant"), held(cache, "other")) == (1, 3)


def serve_retained(cache: PrefixCache, prompt: list[int], retention: int) -> None:
    admission = cache.admit(SCOPE, list(prompt), max_new_tokens=1, retention=retention)
    assert admission is not None
    prefill(cache, admission.table)
    cache.release(admission.table, len(prompt))
    cache.check_integrity()


def test_low_retention_goes_first_and_high_retention_last_whatever_their_age() -> None:
    cache = make_cache(9)
    serve_retained(cache, ids(3, 1), 90)
    serve(cache, ids(3, 2))
    serve_retained(cache, ids(3, 3), 10)
    order = cache.evictor.order(cache.accounts.of("tenant"))
    leaves = [cache.match(SCOPE, [*ids(3, which), 1]).blocks[-1] for which in (3, 2, 1)]
    assert order == leaves
    serve(cache, ids(5, 4))
    kept = [len(cache.match(SCOPE, [*ids(3, which), 1]).blocks) for which in (1, 2, 3)]
    assert kept == [3, 1, 0]


def test_the_last_call_that_names_a_retention_decides() -> None:
    cache = make_cache(8)
    serve_retained(cache, ids(2, 1), 10)
    serve_retained(cache, ids(2, 1), 90)
    serve(cache, ids(2, 2))
    leaves = [cache.match(SCOPE, [*ids(2, which), 1]).blocks[-1] for which in (2, 1)]
    assert cache.evictor.order(cache.accounts.of("tenant")) == leaves


def test_evicted_blocks_are_forgotten_with_their_retention() -> None:
    cache = make_cache(4)
    serve_retained(cache, ids(4, 1), 90)
    serve(cache, ids(4, 2))
    serve(cache, ids(2, 3))
    cache.check_integrity()
    order = cache.evictor.order(cache.accounts.of("tenant"))
    assert order[0] == cache.match(SCOPE, [*ids(2, 2), *ids(1, 7)]).blocks[-1]
    take_plan(cache)


def test_a_path_is_left_when_another_tenants_leaf_is_older_than_its_next_block() -> None:
    cache = make_cache(8)
    serve(cache, ids(3, 1))  # time 1, blocks 0 to 2
    serve(cache, ids(1, 2), scope=OTHER)  # time 2
    serve(cache, [*ids(2, 1), 7])  # time 3: the first two blocks of the path again
    # Two have to go: the leaf of time 1, and the other tenant's of time 2 before the rest of the path.
    serve(cache, ids(5, 3), scope=CacheScope("third", "model@1"))
    assert cache.match(SCOPE, ids(3, 1)).cached_tokens >= 32
    assert held(cache, "other") == 0


def test_one_tenants_retention_does_not_push_out_another_tenants_blocks() -> None:
    cache = make_cache(8)
    for number in range(20):
        serve_retained(cache, ids(4, 100 + number), 100)
    serve(cache, ids(2, 1), scope=OTHER)
    serve_retained(cache, ids(4, 200), 100)
    assert held(cache, "other") == 2


def test_a_young_block_of_low_retention_does_not_shield_old_ones_of_high_retention_from_another_tenant() -> None:
    cache = make_cache(8)
    serve_retained(cache, ids(4, 1), 100)  # old, and never used again
    serve(cache, ids(2, 2), scope=OTHER)
    serve_retained(cache, ids(1, 3), 0)
    serve_retained(cache, ids(3, 4), 100)
    assert held(cache, "other") == 2


def test_a_call_that_keeps_nothing_does_not_change_the_retention_of_what_it_reads() -> None:
    cache = make_cache(8)
    serve(cache, ids(2, 1))
    serve(cache, ids(2, 2))
    admission = cache.admit(SCOPE, [*ids(2, 1), 7], max_new_tokens=1, mode=CacheMode.READ_ONLY, retention=0)
    assert admission is not None
    cache.release(admission.table, 0)
    order = cache.evictor.order(cache.accounts.of("tenant"))
    assert order[0] == cache.match(SCOPE, [*ids(2, 2), 1]).blocks[-1]
