"""Calls that were promised less than they may need: what they can take, and what a refusal leaves."""

import pytest

from prefixgate.cache.admission import CacheMode
from prefixgate.cache.block_pool import NoFreeBlocksError
from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.prefix_cache import PrefixCache
from tests.cache.sequences import SCOPE, make_cache, prefill, serve, take_plan


def ids(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def admit(cache: PrefixCache, tokens: list[int], *, growth: int, new: int = 48) -> BlockTable | None:
    admission = cache.admit(SCOPE, tokens, max_new_tokens=new, growth=growth)
    cache.check_integrity()
    return admission.table if admission else None


def test_a_call_is_admitted_where_its_prompt_and_its_growth_fit() -> None:
    cache = make_cache(8)
    first = admit(cache, ids(40), growth=1)
    assert first is not None
    assert cache.stats().reserved_blocks == 1
    assert cache.room(SCOPE.tenant) == 4
    assert admit(cache, ids(64, 100), growth=1) is None
    assert admit(cache, ids(48, 100), growth=1) is not None
    assert cache.room(SCOPE.tenant) == 0


def test_no_more_is_promised_than_the_call_can_need() -> None:
    cache = make_cache(20)
    assert admit(cache, ids(40), growth=5, new=1) is not None
    assert cache.stats().reserved_blocks == 0


def test_beyond_its_promise_a_call_takes_what_there_is_and_a_refusal_changes_nothing() -> None:
    cache = make_cache(6)
    table = admit(cache, ids(16), growth=1, new=80)
    other = admit(cache, ids(32, 100), growth=0)
    assert table is not None
    assert other is not None
    prefill(cache, table)
    cache.writable(table, 16, 32)
    cache.writable(table, 32, 64)
    assert (len(table.block_ids), cache.stats().free_blocks) == (4, 0)
    with pytest.raises(NoFreeBlocksError):
        cache.writable(table, 64, 65)
    cache.check_integrity()
    assert len(table.block_ids) == 4
    cache.release(other, 0)
    cache.writable(table, 64, 65)
    cache.check_integrity()


def test_a_copy_on_write_that_finds_no_block_leaves_the_table_shared() -> None:
    cache = make_cache(3)
    table = admit(cache, ids(20), growth=0, new=28)
    assert table is not None
    prefill(cache, table)
    fork = cache.fork(table, ids(20))
    assert admit(cache, ids(16, 100), growth=0, new=1) is not None
    with pytest.raises(NoFreeBlocksError):
        cache.writable(fork, 20, 40)
    cache.check_integrity()
    assert fork.block_ids == table.block_ids
    assert not cache.planned_copies()
    cache.release(table, 20)
    assert cache.writable(fork, 20, 21) == 0, "the last holder writes in place"
    take_plan(cache)
    cache.check_integrity()


@pytest.mark.parametrize("blocks_held", [0, 1, 2])
def test_demand_is_what_admission_takes_out_of_the_room(blocks_held: int) -> None:
    cache = make_cache(12)
    serve(cache, ids(40))
    if blocks_held:
        assert admit(cache, ids(blocks_held * 16 + 1), growth=0, new=1) is not None
    prompt = cache.prompt(SCOPE, ids(50))
    for mode in (CacheMode.DEFAULT, CacheMode.READ_ONLY, CacheMode.BYPASS):
        before, demand = cache.room(SCOPE.tenant), cache.demand(prompt, 2, mode)
        admission = cache.admit(SCOPE, ids(50), max_new_tokens=100, mode=mode, prompt=prompt, growth=2)
        assert admission is not None
        took = before - cache.room(SCOPE.tenant)
        assert demand <= took <= demand + admission.copied_blocks
        cache.release(admission.table, 0)
        take_plan(cache)
        cache.check_integrity()
