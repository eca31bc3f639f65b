"""The cache through the operations of a sequence's life."""

import pytest

from prefixgate.cache.block_pool import NoFreeBlocksError
from prefixgate.cache.copy_plan import Copy
from prefixgate.cache.hashing import CacheScope
from tests.cache.sequences import OTHER, SCOPE, admit, make_cache, prefill, serve, serve_cached, take_plan


def ids(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


class TestReuse:
    @pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
    def test_the_same_prompt_thrice_reuses_all_but_its_last_token_and_does_not_grow(self, length: int) -> None:
        cache = make_cache(16)
        first = serve_cached(cache, ids(length))
        after_one = cache.stats().cached_blocks
        second = serve_cached(cache, ids(length))
        third = serve_cached(cache, ids(length))
        assert (first, second, third) == (0, length - 1, length - 1)
        assert cache.stats().cached_blocks == after_one

    def test_the_same_prompt_a_thousand_times_leaves_one_tail(self) -> None:
        cache = make_cache(16)
        for _ in range(1000):
            serve(cache, ids(20))
        assert cache.stats().cached_blocks == 2

    def test_a_prompt_cached_to_its_last_token_copies_fifteen_tokens_of_the_last_block(self) -> None:
        cache = make_cache(8)
        serve(cache, ids(32))
        admission = admit(cache, ids(32))
        assert (admission.block_hit_tokens, admission.partial_copy_tokens, admission.copied_blocks) == (16, 15, 1)
        plan = take_plan(cache)
        assert [copy.tokens for copy in plan.copies] == [15]

    def test_a_prompt_that_leaves_the_tree_inside_a_block_copies_the_common_tokens(self) -> None:
        cache = make_cache(8)
        serve(cache, ids(48))
        admission = admit(cache, [*ids(37), 99, 98])
        assert (admission.block_hit_tokens, admission.partial_copy_tokens) == (32, 5)
        (copy,) = take_plan(cache).copies
        assert copy == Copy(copy.src, admission.table.block_ids[2], 5)

    def test_the_child_with_the_longest_common_prefix_is_the_source(self) -> None:
        cache = make_cache(16)
        for common in (3, 9, 6):
            serve(cache, [*ids(16), *ids(common, 16), *ids(13 - common + 16, 500)])
        assert admit(cache, [*ids(16), *ids(16, 16), 1]).partial_copy_tokens == 9

    def test_the_next_turn_claims_the_tail_of_the_last_without_a_copy(self) -> None:
        cache = make_cache(8)
        turn = ids(20)
        first = admit(cache, turn, new=8)
        prefill(cache, first.table)
        for token in ids(7, 100):  # seven of eight sampled tokens are computed; the eighth has no slot
            first.table.token_ids.append(token)
            cache.writable(first.table, len(first.table.token_ids) - 1, len(first.table.token_ids))
            cache.publish(first.table, len(first.table.token_ids))
        written = len(first.table.token_ids)
        cache.release(first.table, written)
        second = admit(cache, [*turn, *ids(7, 100), 107, 200, 201])
        assert (second.block_hit_tokens, second.claimed_tail_tokens, second.copied_blocks) == (16, 11, 0)
        cache.check_integrity()

    def test_a_tail_that_is_a_prefix_of_a_sibling_is_not_kept(self) -> None:
        cache = make_cache(8)
        serve(cache, ids(32))
        before = cache.stats().cached_blocks
        serve(cache, ids(20))
        assert cache.stats().cached_blocks == before

    def test_a_longer_tail_replaces_the_shorter_one(self) -> None:
        cache = make_cache(8)
        serve(cache, ids(20))
        serve(cache, ids(25))
        assert cache.stats().cached_blocks == 2
        assert serve_cached(cache, ids(30)) == 25

    def test_blocks_go_on_being_cached_through_any_number_of_turns(self) -> None:
        cache = make_cache(32)
        history = ids(5)
        for turn in range(10):
            assert serve_cached(cache, history) == (len(history) - 5 if turn else 0)
            history = [*history, *ids(5, 1000 * (turn + 1))]

    def test_a_conversation_finds_its_tail_among_more_siblings_than_are_looked_at(self) -> None:
        cache = make_cache(128)
        conversations = [[*ids(32), 1000 + number, *ids(5, 2000)] for number in range(40)]
        for _ in range(10):
            for conversation in conversations:
                serve(cache, conversation)
        assert cache.stats().cached_blocks == 2 + 40
        assert {admit(cache, [*conversation, 9]).claimed_tail_tokens for conversation in conversations} == {6}


class TestWrongText:
    def test_a_miss_in_the_middle_ends_the_match(self) -> None:
        cache = make_cache(8)
        serve(cache, ids(64))
        serve(cache, ids(64, 500))
        other = [*ids(16), *ids(16, 700), *ids(32, 32)]
        assert serve_cached(cache, other) == 16

    def test_the_count_of_cached_tokens_is_that_of_admission_and_not_of_an_older_match(self) -> None:
        cache = make_cache(12)
        prompt = ids(64)
        serve(cache, prompt)
        assert cache.match(SCOPE, prompt).cached_tokens == 63
        serve(cache, ids(192, 1000))
        assert admit(cache, prompt).cached_tokens == 0

    def test_nothing_is_shared_before_it_is_published(self) -> None:
        cache = make_cache(32)
        same_step = [admit(cache, ids(40)) for _ in range(8)]
        assert {admission.cached_tokens for admission in same_step} == {0}
        blocks = [block for admission in same_step for block in admission.table.block_ids]
        assert len(set(blocks)) == len(blocks)

    def test_hashes_are_those_of_the_sequence_and_not_of_the_chunk(self) -> None:
        cache = make_cache(32)
        admission = admit(cache, ids(200))
        for start, stop in ((0, 100), (100, 200)):
            cache.writable(admission.table, start, stop)
            take_plan(cache)
            cache.publish(admission.table, stop)
        cache.release(admission.table, 200)
        assert admit(cache, ids(200)).block_hit_tokens == 192
        assert admit(cache, [*ids(16, 96), 1]).cached_tokens == 0

    def test_the_last_sampled_token_is_never_published(self) -> None:
        cache = make_cache(8)
        admission = admit(cache, ids(15), new=2)
        prefill(cache, admission.table)
        admission.table.token_ids.append(15)  # sampled, not computed
        cache.release(admission.table, 15)
        cache.check_integrity()
        assert admit(cache, [*ids(15), 15, 77]).cached_tokens == 15

    def test_a_history_that_was_changed_hits_only_what_is_the_same(self) -> None:
        cache = make_cache(8)
        serve(cache, [*ids(15), 100])
        serve(cache, [*ids(15), 200])
        for last in (100, 200):
            admission = admit(cache, [*ids(15), last, 7, 8])
            assert admission.block_hit_tokens == 16
            cache.release(admission.table, 0)

    def test_a_faulted_sequence_leaves_nothing_behind(self) -> None:
        cache = make_cache(8)
        admission = admit(cache, ids(40))
        cache.writable(admission.table, 0, 40)
        take_plan(cache)
        cache.release(admission.table, 0)
        cache.check_integrity()
        assert cache.stats().free_blocks == 8
        assert admit(cache, ids(40)).cached_tokens == 0


class TestReferences:
    def test_a_hit_shares_the_physical_block_and_counts_it(self) -> None:
        cache = make_cache(8)
        serve(cache, ids(32))
        second, third = admit(cache, [*ids(32), 1]), admit(cache, [*ids(32), 2])
        shared = second.table.block_ids[:2]
        assert third.table.block_ids[:2] == shared
        assert [cache.pool.ref_counts[block] for block in shared] == [2, 2]
        assert not set(shared) & set(cache.pool.free_blocks())

    def test_an_evicted_prefix_is_a_miss_though_its_blocks_live_on(self) -> None:
        cache = make_cache(4)
        serve(cache, ids(64))
        serve(cache, ids(64, 500))
        assert cache.match(SCOPE, ids(64)).cached_tokens == 0

    def test_equal_cold_prompts_side_by_side_end_with_one_block_each(self) -> None:
        cache = make_cache(8)
        first, second = admit(cache, ids(33)), admit(cache, ids(33))
        prefill(cache, first.table)
        prefill(cache, second.table)
        assert first.table.block_ids[:2] == second.table.block_ids[:2]
        cache.check_integrity()
        cache.release(first.table, 33)
        cache.check_integrity()
        assert cache.match(SCOPE, ids(40)).cached_tokens >= 32
        cache.release(second.table, 33)
        assert sum(cache.pool.ref_counts) == 0

    def test_a_second_release_does_nothing(self) -> None:
        cache = make_cache(8)
        admission = admit(cache, ids(20), new=200 - 120)
        cache.release(admission.table, 0)
        before = cache.stats()
        cache.release(admission.table, 20)
        assert cache.stats() == before

    def test_idle_shared_blocks_are_counted_once(self) -> None:
        cache = make_cache(16)
        tables = [admit(cache, ids(160)).table]
        prefill(cache, tables[0])
        tables += [cache.fork(tables[0], ids(160)) for _ in range(2)]
        for table in tables:
            cache.release(table, 160)
        assert cache.stats().cached_blocks == 10
        cache.check_integrity()

    @pytest.mark.parametrize("held", range(6))
    def test_an_admission_that_does_not_fit_takes_nothing(self, held: int) -> None:
        cache = make_cache(6)
        serve(cache, ids(32))
        holder = admit(cache, ids(16 * held, 500)) if held else None
        before = cache.stats()
        order = cache.evictor.order(cache.accounts.of("tenant"))
        if cache.admit(SCOPE, [*ids(32), *ids(64, 900)], max_new_tokens=1) is None:
            assert cache.stats() == before
            assert cache.evictor.order(cache.accounts.of("tenant")) == order
        else:
            assert held == 0
        if holder:
            cache.release(holder.table, 0)
        cache.check_integrity()

    def test_short_prompts_leak_nothing(self) -> None:
        cache = make_cache(8)
        for length in range(1, 16):
            for written in (0, length):
                cache.release(admit(cache, ids(length, length * 50), new=3).table, written)
        cache.check_integrity()
        assert sum(cache.pool.ref_counts) == 0


class TestScopes:
    def test_the_same_tenant_hits_and_every_other_scope_does_not(self) -> None:
        cache = make_cache(64)
        serve(cache, ids(40))
        assert admit(cache, ids(41)).cached_tokens == 40
        strangers = [
            OTHER,
            CacheScope(SCOPE.tenant, "model@2"),
            CacheScope(SCOPE.tenant, SCOPE.model, adapter="a"),
            CacheScope(SCOPE.tenant, SCOPE.model, salt="s"),
        ]
        assert {admit(cache, ids(41), scope=scope).cached_tokens for scope in strangers} == {0}

    def test_scopes_without_blocks_or_users_are_forgotten(self) -> None:
        cache = make_cache(4)
        for number in range(1000):
            serve(cache, ids(40), scope=CacheScope("tenant", "model", salt=str(number)))
        assert len(list(cache.index.roots())) <= 4


class TestForks:
    def test_three_outputs_copy_the_partial_tail_twice(self) -> None:
        cache = make_cache(32)
        tables = [admit(cache, ids(20), new=30, outputs=3).table]
        prefill(cache, tables[0])
        tables += [cache.fork(tables[0], ids(20)) for _ in range(2)]
        assert len({tuple(table.block_ids) for table in tables}) == 1
        copied = []
        for number, table in enumerate(tables):
            table.token_ids.append(100 + number)
            copied.append(cache.writable(table, 20, 21))
        assert copied == [1, 1, 0]
        assert len({table.block_ids[1] for table in tables}) == 3
        assert len({table.block_ids[0] for table in tables}) == 1
        plan = take_plan(cache)
        assert [copy.tokens for copy in plan.copies] == [4, 4]
        cache.check_integrity()

    def test_a_prompt_that_ends_with_its_block_is_forked_without_a_copy(self) -> None:
        cache = make_cache(32)
        table = admit(cache, ids(32), new=5, outputs=2).table
        prefill(cache, table)
        fork = cache.fork(table, ids(32))
        assert [cache.writable(each, 32, 33) for each in (table, fork)] == [0, 0]
        assert table.block_ids[2] != fork.block_ids[2]

    def test_a_table_with_full_blocks_that_are_not_published_is_not_forked(self) -> None:
        cache = make_cache(32)
        table = admit(cache, ids(40), new=5, outputs=2).table
        with pytest.raises(RuntimeError, match="forked with 0 of its full blocks published"):
            cache.fork(table, ids(40))
        prefill(cache, table)
        cache.fork(table, ids(40))
        cache.check_integrity()

    def test_the_whole_growth_of_all_outputs_is_reserved_at_admission(self) -> None:
        cache = make_cache(9)
        # 20 prompt tokens and 31 slots of growth are 4 blocks; two outputs share the first: 4 + 3.
        assert cache.blocks_needed(20, 32, 2) == 7
        admission = admit(cache, ids(20), new=32, outputs=2)
        assert cache.admit(SCOPE, ids(40, 500), max_new_tokens=1) is None
        prefill(cache, admission.table)
        fork = cache.fork(admission.table, ids(20))
        for table in (admission.table, fork):
            table.token_ids += ids(31, 100)
            cache.writable(table, 20, 51)
        take_plan(cache)
        assert cache.stats().reserved_blocks == 0
        with pytest.raises(NoFreeBlocksError):
            cache.writable(fork, 51, 51 + 64)

    def test_what_an_output_did_not_use_is_given_back_with_the_last_output(self) -> None:
        cache = make_cache(16)
        admission = admit(cache, ids(20), new=32, outputs=2)
        prefill(cache, admission.table)
        fork = cache.fork(admission.table, ids(20))
        cache.release(admission.table, 20)
        cache.release(fork, 20)
        assert cache.stats().reserved_blocks == 0
        cache.check_integrity()


class TestCopies:
    def test_a_source_is_held_until_its_copy_is_ordered(self) -> None:
        cache = make_cache(4)
        serve(cache, ids(48))
        admission = admit(cache, [*ids(20), 99], new=1)
        (copy,) = cache.planned_copies()
        assert cache.pool.ref_counts[copy.src] == 1
        # Everything else can be taken meanwhile, the source cannot.
        assert cache.admit(OTHER, ids(48), max_new_tokens=1) is None
        assert cache.index.is_node(copy.src)
        assert admission.table.block_ids[1] == copy.dst

    def test_a_cancel_before_the_copy_ran_drops_the_copy_and_the_hold(self) -> None:
        cache = make_cache(4)
        serve(cache, ids(48))
        admission = admit(cache, [*ids(20), 99])
        cache.release(admission.table, 0)
        assert take_plan(cache).copies == []
        assert sum(cache.pool.ref_counts) == 0
        cache.check_integrity()

    def test_what_a_copy_has_not_brought_yet_is_not_kept(self) -> None:
        cache = make_cache(4)
        first = admit(cache, ids(17), new=4, outputs=2).table
        prefill(cache, first)
        second = cache.fork(first, ids(17))
        first.token_ids.append(100)
        assert cache.writable(first, 17, 18) == 1
        # Both are preempted in the step that planned the copy.
        source, destination = second.block_ids[1], first.block_ids[1]
        cache.release(first, 17)
        assert (cache.index.is_node(destination), cache.planned_copies()) == (False, [])
        cache.release(second, 17)
        assert cache.index.is_tail(source)
        cache.check_integrity()
        serve(cache, ids(64, 500))
        assert sum(cache.pool.ref_counts) == 0

    def test_a_source_that_only_its_copy_still_needs_is_accounted_for(self) -> None:
        cache = make_cache(16)
        table = admit(cache, ids(20), new=5, outputs=2).table
        prefill(cache, table)
        fork = cache.fork(table, ids(20))
        cache.writable(fork, 20, 21)
        cache.release(table, 0)
        cache.check_integrity()
        take_plan(cache)
        cache.check_integrity()

    def test_a_chain_of_copies_is_rewritten_to_the_first_source(self) -> None:
        cache = make_cache(8)
        serve(cache, ids(48))
        admission = admit(cache, [*ids(20), 99, 98], new=4, outputs=2)
        fork = cache.fork(admission.table, [*ids(20), 99, 98])
        cache.writable(fork, 20, 22)
        plan = take_plan(cache)
        assert len({copy.src for copy in plan.copies}) == 1
        assert {copy.dst for copy in plan.copies} == {admission.table.block_ids[1], fork.block_ids[1]}
        assert [copy.tokens for copy in plan.copies] == [4, 4]
        cache.release(admission.table, 0)
        cache.release(fork, 0)
        cache.check_integrity()

    def test_a_partial_copy_gives_way_when_its_source_would_be_the_one_block_too_many(self) -> None:
        cache = make_cache(3)
        serve(cache, ids(48))
        admission = admit(cache, [*ids(20), *ids(28, 900)])
        assert (admission.block_hit_tokens, admission.partial_copy_tokens) == (16, 0)
        cache.check_integrity()

    def test_fresh_blocks_are_named_once_for_poisoning(self) -> None:
        cache = make_cache(4)
        admission = admit(cache, ids(40))
        assert sorted(take_plan(cache).fresh) == sorted(admission.table.block_ids)
        assert take_plan(cache).fresh == []


def test_a_call_that_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="the call needs 5 blocks; the tenant can have 4"):
        make_cache(4).admit(SCOPE, ids(60), max_new_tokens=10)


def test_a_match_changes_nothing() -> None:
    cache = make_cache(8)
    serve(cache, ids(32))
    serve(cache, ids(32, 500))
    before, order = cache.stats(), cache.evictor.order(cache.accounts.of("tenant"))
    for _ in range(3):
        assert cache.match(SCOPE, ids(40)).cached_tokens == 32
        assert cache.match(OTHER, ids(40)).cached_tokens == 0
    assert (cache.stats(), cache.evictor.order(cache.accounts.of("tenant"))) == (before, order)
