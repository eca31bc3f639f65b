"""Reference counts and states of blocks."""

import pytest

from prefixgate.cache.accounts import Account
from prefixgate.cache.block_pool import BlockPool, NoFreeBlocksError


def account() -> Account:
    return Account("tenant", 0, 100)


def test_a_fresh_pool_hands_out_blocks_in_order() -> None:
    pool, own = BlockPool(4), account()
    assert pool.take(3, own) == [0, 1, 2]
    assert (pool.num_free, pool.num_active, pool.num_cached) == (1, 3, 0)


def test_taking_too_many_takes_nothing() -> None:
    pool, own = BlockPool(2), account()
    with pytest.raises(NoFreeBlocksError, match="3 blocks were asked for and 2 are free"):
        pool.take(3, own)
    assert pool.num_free == 2
    assert pool.take(0, own) == []


def test_a_published_block_without_references_is_cached_and_an_unpublished_one_free() -> None:
    pool, own = BlockPool(2), account()
    first, second = pool.take(2, own)
    assert pool.release([first], own, published=True) == 1
    assert pool.release([second], own, published=False) == 1
    assert (pool.num_free, pool.num_cached) == (1, 1)


def test_a_hit_revives_a_cached_block_without_the_free_list() -> None:
    pool, own = BlockPool(1), account()
    pool.take(1, own)
    pool.release([0], own, published=True)
    assert pool.hold([0], own) == 1
    assert pool.hold([0], own) == 0
    assert pool.ref_counts[0] == 2
    assert (pool.num_free, pool.num_active, pool.num_cached) == (0, 1, 0)


def test_a_shared_block_stays_until_its_last_holder_goes() -> None:
    pool, own = BlockPool(1), account()
    pool.take(1, own)
    pool.hold([0], own)
    assert pool.release([0], own, published=False) == 0
    assert pool.num_active == 1
    assert pool.release([0], own, published=False) == 1
    assert pool.num_free == 1


def test_a_second_release_is_an_error_and_changes_nothing() -> None:
    pool, own = BlockPool(1), account()
    pool.take(1, own)
    pool.release([0], own, published=False)
    with pytest.raises(RuntimeError, match="block 0 was released more often"):
        pool.release([0], own, published=False)
    assert (pool.ref_counts[0], pool.num_free) == (0, 1)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks: 0"):
        BlockPool(0)
