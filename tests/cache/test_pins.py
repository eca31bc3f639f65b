"""Leases on prefixes."""

import pytest

from prefixgate.cache.accounts import TenantShare
from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.pins import PinLimitError
from prefixgate.cache.prefix_cache import PrefixCache
from tests.cache.sequences import KEY, OTHER, SCOPE, admit, serve, take_plan


def ids(blocks: int, first: int = 0) -> list[int]:
    return [first * 1000 + i for i in range(blocks * 16)]


def pinning_cache(blocks: int = 16, limit: int = 4) -> PrefixCache:
    return PrefixCache(blocks, BlockHasher(KEY), pin_limit=limit)


def test_a_pinned_prefix_survives_any_flood_until_it_is_unpinned() -> None:
    cache = pinning_cache()
    serve(cache, ids(3))
    pin = cache.pin(SCOPE, ids(3), expires_at=100.0)
    for number in range(1, 20):
        serve(cache, ids(6, number))
    assert cache.match(SCOPE, [*ids(3), 1]).cached_tokens == 48
    assert cache.unpin(pin.account.tenant, pin.pin_id)
    assert not cache.unpin(pin.account.tenant, pin.pin_id)
    for number in range(20, 40):
        serve(cache, ids(6, number))
    assert cache.match(SCOPE, [*ids(3), 1]).cached_tokens == 0


def test_a_pin_ends_by_itself_when_its_time_has_come_and_not_before() -> None:
    cache = pinning_cache()
    serve(cache, ids(2))
    cache.pin(SCOPE, ids(2), expires_at=10.0)
    assert cache.expire(9.9) == 0
    assert cache.stats().pinned_blocks == 2
    assert cache.expire(10.0) == 1
    assert cache.stats().pinned_blocks == 0
    assert sum(cache.pool.ref_counts) == 0
    cache.check_integrity()


def test_beyond_the_limit_nothing_is_pinned_and_the_numbers_are_told() -> None:
    cache = pinning_cache()
    serve(cache, ids(3))
    serve(cache, ids(3, 1))
    cache.pin(SCOPE, ids(3), expires_at=10.0)
    with pytest.raises(PinLimitError, match="3 more blocks than 3 would be pinned; the limit is 4"):
        cache.pin(SCOPE, ids(3, 1), expires_at=10.0)
    assert cache.stats().pinned_blocks == 3
    cache.check_integrity()


def test_a_block_that_two_pins_hold_counts_once_and_goes_with_the_second() -> None:
    cache = pinning_cache()
    serve(cache, ids(4))
    first = cache.pin(SCOPE, ids(4), expires_at=10.0)
    second = cache.pin(SCOPE, ids(2), expires_at=20.0)
    assert cache.stats().pinned_blocks == 4
    cache.unpin("tenant", first.pin_id)
    assert cache.stats().pinned_blocks == 2
    assert [cache.pins.count(block) for block in second.blocks] == [1, 1]
    cache.check_integrity()


def test_only_what_is_cached_is_pinned() -> None:
    cache = pinning_cache()
    assert cache.pin(SCOPE, ids(2), expires_at=1.0).blocks == []
    serve(cache, ids(2))
    assert len(cache.pin(SCOPE, ids(4), expires_at=1.0).blocks) == 2
    cache.expire(2.0)
    cache.check_integrity()


def test_a_pin_does_not_take_what_others_were_promised() -> None:
    cache = PrefixCache(8, BlockHasher(KEY), pin_limit=3)
    serve(cache, ids(3))
    promised = admit(cache, ids(1, 1), new=65, scope=OTHER)
    admit(cache, ids(1, 2), new=17, scope=CacheScope("third", "model@1"))
    with pytest.raises(PinLimitError, match="3 idle blocks would be pinned; the tenant can take 1 now"):
        cache.pin(SCOPE, ids(3), expires_at=1.0)
    cache.check_integrity()
    promised.table.token_ids += ids(4, 3)
    cache.writable(promised.table, 16, 80)
    take_plan(cache)
    cache.check_integrity()


def test_a_pin_leaves_another_tenants_floor_and_its_own_cap_alone() -> None:
    shares = {"other": TenantShare(floor=4), "tenant": TenantShare(cap=5)}
    cache = PrefixCache(12, BlockHasher(KEY), shares=shares, pin_limit=4)
    serve(cache, ids(2))
    admit(cache, ids(1, 1), new=40)
    with pytest.raises(PinLimitError, match="2 idle blocks would be pinned; the tenant can take 1 now"):
        cache.pin(SCOPE, ids(2), expires_at=1.0)
    cache.check_integrity()


def test_a_tenant_that_may_pin_so_much_leaves_the_rest_to_others() -> None:
    shares = {"tenant": TenantShare(pin_cap=3), "other": TenantShare()}
    cache = PrefixCache(32, BlockHasher(KEY), shares=shares, pin_limit=8)
    serve(cache, ids(2))
    serve(cache, ids(2, 1))
    pin = cache.pin(SCOPE, ids(2), expires_at=1.0)
    with pytest.raises(PinLimitError, match="2 more than 2 of the tenant's would be pinned; it may pin 3"):
        cache.pin(SCOPE, ids(2, 1), expires_at=1.0)
    # Nor by another length of what is pinned, but one block of it is: only what is new counts.
    assert cache.pin(SCOPE, ids(2), expires_at=9.0) is pin
    assert len(cache.pin(SCOPE, ids(1), expires_at=1.0).blocks) == 1
    other = CacheScope("other", "m")
    serve(cache, ids(5, 2), scope=other)
    assert len(cache.pin(other, ids(5, 2), expires_at=1.0).blocks) == 5
    cache.check_integrity()
    # What it unpins it may pin again.
    assert cache.unpin("tenant", pin.pin_id)
    assert len(cache.pin(SCOPE, ids(2, 1), expires_at=1.0).blocks) == 2
    cache.check_integrity()


def test_another_tenant_cannot_release_a_pin() -> None:
    cache = pinning_cache()
    serve(cache, ids(2))
    pin = cache.pin(SCOPE, ids(2), expires_at=1.0)
    assert not cache.unpin("other", pin.pin_id)
    assert cache.stats().pinned_blocks == 2
    assert cache.unpin("tenant", pin.pin_id)


def test_a_prefix_that_is_pinned_keeps_its_pin_which_is_only_ever_extended() -> None:
    cache = pinning_cache()
    serve(cache, ids(3))
    pin = cache.pin(SCOPE, ids(3), expires_at=10.0)
    assert cache.pin(SCOPE, ids(3), expires_at=30.0) is pin
    assert cache.pin(SCOPE, ids(3), expires_at=20.0) is pin
    assert (len(cache.pins), pin.expires_at) == (1, 30.0)
    assert cache.expire(29.9) == 0
    cache.check_integrity()
    assert cache.expire(30.0) == 1
    assert sum(cache.pool.ref_counts) == 0
    cache.check_integrity()


def test_pins_that_come_and_go_leave_nothing_behind_whatever_their_time() -> None:
    cache = pinning_cache()
    serve(cache, ids(2))
    for _ in range(1000):
        assert cache.unpin("tenant", cache.pin(SCOPE, ids(2), expires_at=1e9).pin_id)
    pin = cache.pin(SCOPE, ids(2), expires_at=1e9)
    # What expires next is looked for among few: the ends of pins that are gone were swept away.
    assert cache.expire(1e9 - 1) == 0
    assert cache.pins.next_expiry == 1e9
    assert cache.pins.all() == [pin]
    assert cache.expire(1e9) == 1
    assert cache.pins.next_expiry is None


def test_the_next_expiry_is_never_later_than_that_of_any_pin() -> None:
    cache = pinning_cache(limit=8)
    for first in range(3):
        serve(cache, ids(2, first))
        cache.pin(SCOPE, ids(2, first), expires_at=30.0 - 10 * first)
    assert cache.pins.next_expiry == 10.0
    cache.pin(SCOPE, ids(2, 2), expires_at=40.0)
    assert cache.expire(10.0) == 0
    assert cache.pins.next_expiry == 20.0


def test_each_tenants_pins_are_counted_apart() -> None:
    cache = pinning_cache(limit=8)
    for scope in (SCOPE, OTHER):
        serve(cache, ids(3), scope=scope)
    mine = [cache.pin(SCOPE, ids(blocks), expires_at=1.0) for blocks in (1, 3)]
    cache.pin(OTHER, ids(2), expires_at=1.0)
    assert cache.pins.of(SCOPE.tenant) == mine
    assert [cache.pins.num_blocks_of(scope.tenant) for scope in (SCOPE, OTHER)] == [3, 2]
    assert cache.stats().pinned_blocks == 5
