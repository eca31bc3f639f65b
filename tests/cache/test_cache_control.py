"""Modes, flushes, waiting for a leader, explanations, events, and the index that never hits."""

import pytest

from prefixgate.cache.admission import CacheMode
from prefixgate.cache.events import Cleared, EventLog, Gap, Removed, Stored
from prefixgate.cache.hashing import ROOT_HASH, BlockHasher, CacheScope
from prefixgate.cache.matching import MissReason
from prefixgate.cache.null_index import NullPrefixIndex
from prefixgate.cache.prefix_cache import PrefixCache
from tests.cache.sequences import KEY, OTHER, SCOPE, admit, make_cache, prefill, serve, take_plan

SALTED = CacheScope(SCOPE.tenant, SCOPE.model, salt="s")


def ids(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def serve_with(cache: PrefixCache, prompt: list[int], mode: CacheMode) -> int:
    admission = cache.admit(SCOPE, list(prompt), max_new_tokens=1, mode=mode)
    assert admission is not None
    prefill(cache, admission.table)
    cache.release(admission.table, len(prompt))
    cache.check_integrity()
    return admission.cached_tokens


class TestModes:
    def test_a_read_only_call_hits_and_keeps_nothing(self) -> None:
        cache = make_cache(16)
        serve(cache, ids(32))
        before = cache.stats().cached_blocks
        assert serve_with(cache, [*ids(32), *ids(30, 500)], CacheMode.READ_ONLY) == 32
        assert cache.stats().cached_blocks == before

    def test_a_read_only_call_copies_a_tail_and_does_not_take_it_away(self) -> None:
        cache = make_cache(16)
        serve(cache, ids(20))
        assert serve_with(cache, [*ids(20), 500, 501], CacheMode.READ_ONLY) == 20
        assert serve_with(cache, [*ids(20), 600, 601], CacheMode.READ_ONLY) == 20

    def test_a_bypassing_call_neither_hits_nor_keeps(self) -> None:
        cache = make_cache(16)
        serve(cache, ids(32))
        assert serve_with(cache, ids(33), CacheMode.BYPASS) == 0
        assert serve_with(cache, ids(32, 500), CacheMode.BYPASS) == 0
        assert cache.match(SCOPE, ids(33, 500)).cached_tokens == 0


class TestFlush:
    def test_a_flush_forgets_one_tenant_with_all_its_salts_and_no_other(self) -> None:
        cache = make_cache(16)
        for scope in (SCOPE, SALTED, OTHER):
            serve(cache, ids(32), scope=scope)
        assert cache.flush(SCOPE.tenant) == 4
        matched = [cache.match(scope, ids(40)).cached_tokens for scope in (SCOPE, SALTED, OTHER)]
        assert matched == [0, 0, 32]
        cache.check_integrity()

    def test_a_flush_of_one_salt_leaves_the_others_and_tells_routers_which_blocks_went(self) -> None:
        cache = make_cache(16)
        for scope in (SCOPE, SALTED, OTHER):
            serve(cache, ids(40), scope=scope)
        before = cache.events.last
        assert cache.flush(SCOPE.tenant, SALTED.salt) == 3
        matched = [cache.match(scope, ids(50)).cached_tokens for scope in (SCOPE, SALTED, OTHER)]
        assert matched == [40, 0, 40]
        told = [event for _, event in cache.events.since(before)]
        assert told == [Removed(SCOPE.tenant, tuple(cache.prompt(SALTED, ids(32)).hashes), flushed=True)]
        cache.check_integrity()
        assert cache.flush(SCOPE.tenant, "a salt that nobody used") == 0
        assert cache.match(SCOPE, ids(50)).cached_tokens == 40

    def test_live_sequences_keep_their_blocks_and_are_never_found_again(self) -> None:
        cache = make_cache(16)
        serve(cache, ids(32))
        live = admit(cache, [*ids(32), 7, 8], new=40)
        cache.flush(SCOPE.tenant)
        cache.check_integrity()
        assert cache.match(SCOPE, ids(40)).cached_tokens == 0
        prefill(cache, live.table)
        assert serve(cache, ids(32)).cached_tokens == 0
        cache.release(live.table, 34)
        cache.check_integrity()
        assert cache.stats().cached_blocks == 2
        assert serve(cache, ids(33)).cached_tokens == 32

    def test_a_copy_out_of_flushed_content_still_runs(self) -> None:
        cache = make_cache(16)
        serve(cache, ids(48))
        live = admit(cache, [*ids(20), 900])
        cache.flush(SCOPE.tenant)
        cache.check_integrity()
        assert len(take_plan(cache).copies) == 1
        cache.check_integrity()
        cache.release(live.table, 21)
        assert cache.stats().free_blocks == 16

    def test_pins_keep_flushed_blocks_from_others_until_they_end(self) -> None:
        cache = PrefixCache(16, BlockHasher(KEY), pin_limit=4)
        serve(cache, ids(32))
        cache.pin(SCOPE, ids(32), expires_at=1.0)
        assert cache.flush(SCOPE.tenant) == 0
        cache.check_integrity()
        cache.expire(1.0)
        assert cache.stats().free_blocks == 16
        cache.check_integrity()


class TestLeaders:
    def test_an_equal_cold_prompt_finds_the_table_that_computes_its_next_node(self) -> None:
        cache = make_cache(32)
        prompt = cache.prompt(SCOPE, ids(64))
        assert cache.leader(prompt) is None
        leader = admit(cache, ids(64)).table
        for stop in (32, 48):
            assert cache.leader(prompt) is leader
            take_plan(cache)
            cache.publish(leader, stop)
        # What is left of the prompt is its last block, which is computed in any case.
        assert cache.leader(prompt) is None
        assert cache.leader(cache.prompt(SCOPE, ids(80))) is leader

    def test_a_prompt_that_diverges_waits_for_the_common_part_only(self) -> None:
        cache = make_cache(32)
        leader = admit(cache, ids(64)).table
        prompt = cache.prompt(SCOPE, [*ids(32), *ids(40, 900)])
        assert cache.leader(prompt) is leader
        take_plan(cache)
        cache.publish(leader, 32)
        assert cache.leader(prompt) is None

    def test_nobody_waits_for_a_leader_that_is_gone(self) -> None:
        cache = make_cache(32)
        cache.release(admit(cache, ids(64)).table, 0)
        assert cache.leader(cache.prompt(SCOPE, ids(64))) is None
        assert len(cache.in_flight) == 0

    @pytest.mark.parametrize("scope", [OTHER, SALTED])
    def test_other_scopes_do_not_wait(self, scope: CacheScope) -> None:
        cache = make_cache(32)
        admit(cache, ids(64))
        assert cache.leader(cache.prompt(scope, ids(64))) is None

    def test_a_call_that_keeps_nothing_leads_nobody(self) -> None:
        cache = make_cache(32)
        cache.admit(SCOPE, ids(64), max_new_tokens=1, mode=CacheMode.READ_ONLY)
        assert cache.leader(cache.prompt(SCOPE, ids(64))) is None

    def test_when_the_first_of_two_is_gone_the_second_leads(self) -> None:
        cache = make_cache(32)
        first, second = admit(cache, ids(64)).table, admit(cache, ids(64)).table
        cache.release(first, 0)
        assert cache.leader(cache.prompt(SCOPE, ids(64))) is second

    def test_of_two_that_compute_the_same_the_first_leads_and_the_end_leaves_nothing(self) -> None:
        cache = make_cache(32)
        first, second = admit(cache, ids(64)).table, admit(cache, ids(64)).table
        assert cache.leader(cache.prompt(SCOPE, ids(64))) is first
        for table in (first, second):
            prefill(cache, table)
            cache.release(table, 64)
        assert len(cache.in_flight) == 0
        cache.check_integrity()


class TestExplain:
    def test_a_prompt_that_was_never_seen(self) -> None:
        explained = make_cache(8).explain(SCOPE, ids(40))
        assert (explained.reason, explained.missed_at) == (MissReason.NEVER_SEEN, 0)

    def test_a_prompt_of_which_all_but_the_last_token_is_cached(self) -> None:
        cache = make_cache(8)
        serve(cache, ids(40))
        explained = cache.explain(SCOPE, ids(40))
        assert (explained.reason, explained.missed_at) == (MissReason.NONE, 39)
        assert (explained.block_hit_tokens, explained.partial_copy_tokens) == (32, 7)

    def test_a_prompt_that_diverges_inside_a_block_and_how_far_the_other_one_goes(self) -> None:
        cache = make_cache(8)
        serve(cache, ids(48))
        explained = cache.explain(SCOPE, [*ids(37), *ids(20, 900)])
        assert (explained.reason, explained.missed_at) == (MissReason.DIVERGED, 37)
        assert (explained.diverged_at, explained.continuation_tokens) == (5, 11)

    def test_a_prompt_that_was_evicted(self) -> None:
        cache = make_cache(4)
        serve(cache, ids(64))
        serve(cache, ids(32, 500))
        explained = cache.explain(SCOPE, ids(64))
        assert (explained.reason, explained.missed_at) == (MissReason.EVICTED, 32)

    def test_a_tail_that_would_be_claimed(self) -> None:
        cache = make_cache(8)
        serve(cache, ids(20))
        assert cache.explain(SCOPE, ids(30)).claimed_tail_tokens == 4

    def test_what_other_tenants_and_salts_hold_or_lost_looks_never_seen(self) -> None:
        cache = make_cache(4)
        serve(cache, ids(64))
        serve(cache, ids(32, 500))
        for scope in (OTHER, SALTED):
            assert cache.explain(scope, ids(64)).reason is MissReason.NEVER_SEEN

    def test_one_tenants_flood_does_not_make_anothers_evictions_forgotten(self) -> None:
        cache = make_cache(4)
        serve(cache, ids(64))
        for number in range(50):
            serve(cache, ids(64, 1000 + 64 * number), scope=OTHER)
        assert cache.explain(SCOPE, ids(65)).reason is MissReason.EVICTED

    def test_the_reason_is_told_at_admission_too(self) -> None:
        cache = make_cache(8)
        serve(cache, ids(48))
        assert admit(cache, [*ids(37), 900]).miss_reason is MissReason.NONE
        assert admit(cache, [*ids(37), 900, 901]).miss_reason is MissReason.DIVERGED


class TestEvents:
    def test_a_block_is_announced_when_published_and_when_evicted_under_its_hash(self) -> None:
        cache = make_cache(4)
        serve(cache, ids(40))
        hashes = tuple(cache.prompt(SCOPE, ids(32)).hashes)
        assert cache.events.since(0) == [(1, Stored("tenant", ROOT_HASH, hashes))]
        serve(cache, ids(64, 500), scope=OTHER)
        removed = [event for _, event in cache.events.since(1) if isinstance(event, Removed)]
        assert [name for event in removed for name in event.hashes] == list(reversed(hashes))

    def test_a_chain_that_grows_names_its_parent(self) -> None:
        cache = make_cache(8)
        serve(cache, ids(32))
        serve(cache, ids(48))
        hashes = cache.prompt(SCOPE, ids(48)).hashes
        assert cache.events.since(1) == [(2, Stored("tenant", hashes[1], (hashes[2],)))]

    def test_a_twin_is_not_announced_and_not_removed_while_the_other_stays(self) -> None:
        cache = make_cache(8)
        first, second = admit(cache, ids(32)).table, admit(cache, ids(32)).table
        for table in (first, second):
            prefill(cache, table)
        cache.release(first, 32)
        assert cache.events.last == 1

    def test_replaying_the_events_gives_the_index(self) -> None:
        cache = make_cache(8)
        for number in range(40):
            serve(cache, ids(16 * (1 + number % 5), 100 * (number % 7)), scope=(SCOPE, OTHER)[number % 2])
            if number == 25:
                cache.flush("other")
        known: dict[bytes, str] = {}
        for _, event in cache.events.since(0):
            match event:
                case Stored(tenant, parent, hashes):
                    assert parent == ROOT_HASH or known[parent] == tenant
                    known.update(dict.fromkeys(hashes, tenant))
                case Removed(_, hashes):
                    for name in hashes:
                        del known[name]
                case Cleared(tenant):
                    known = {name: owner for name, owner in known.items() if owner != tenant}
        assert known.keys() == {name for _, name in cache.snapshot()}

    def test_a_reader_that_fell_behind_is_told(self) -> None:
        log = EventLog("life", capacity=3)
        for _ in range(5):
            log.cleared("t")
        assert [number for number, _ in log.since(2)] == [3, 4, 5]
        assert log.since(5) == []
        for number in (0, 1, 6):
            with pytest.raises(Gap):
                log.since(number)


def test_the_null_index_never_hits_and_keeps_nothing() -> None:
    cache = PrefixCache(8, BlockHasher(KEY), index=NullPrefixIndex)
    for _ in range(3):
        assert serve(cache, ids(40)).cached_tokens == 0
    assert cache.stats().free_blocks == 8
    table = admit(cache, ids(40), new=5, outputs=2).table
    prefill(cache, table)
    assert cache.fork(table, ids(40)).block_ids == table.block_ids
