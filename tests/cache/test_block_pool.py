"""Reference counts and states of blocks."""

import pytest

from prefixgate.cache.block_pool import BlockPool, NoFreeBlocksError


def test_a_fresh_pool_hands_out_blocks_in_order() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    assert (pool.num_free, pool.num_active, pool.num_cached) == (1, 3, 0)


def test_taking_too_many_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(NoFreeBlocksError, match="3 blocks were asked for and 2 are free"):
        pool.take(3)
    assert pool.num_free == 2
    assert pool.take(0) == []


def test_a_published_block_without_references_is_cached_and_an_unpublished_one_free() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    assert pool.release([first], published=True) == 1
    assert pool.release([second], published=False) == 1
    assert (pool.num_free, pool.num_cached) == (1, 1)


def test_a_hit_revives_a_cached_block_without_the_free_list() -> None:
    pool = BlockPool(1)
    pool.take(1)
    pool.release([0], published=True)
    assert pool.hold([0]) == 1
    assert pool.hold([0]) == 0
    assert pool.ref_counts[0] == 2
    assert (pool.num_free, pool.num_active, pool.num_cached) == (0, 1, 0)


def test_a_shared_block_stays_until_its_last_holder_goes() -> None:
    pool = BlockPool(1)
    pool.take(1)
    pool.hold([0])
    assert pool.release([0], published=False) == 0
    assert pool.num_active == 1
    assert pool.release([0], published=False) == 1
    assert pool.num_free == 1


def test_a_second_release_is_an_error_and_changes_nothing() -> None:
    pool = BlockPool(1)
    pool.take(1)
    pool.release([0], published=False)
    with pytest.raises(RuntimeError, match="block 0 was released more often"):
        pool.release([0], published=False)
    assert (pool.ref_counts[0], pool.num_free) == (0, 1)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks: 0"):
        BlockPool(0)
