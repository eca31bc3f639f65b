"""The decision: a table of cases, each with its story, and bursts of many calls."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from prefixgate.cache.hashing import BlockHash, BlockHasher, CacheScope
from prefixgate.config.routing_settings import RoutingSettings
from prefixgate.gateway.candidate import Candidate, Choice
from prefixgate.gateway.pending_prompts import PendingPrompts
from prefixgate.gateway.router import PrefixRouter
from prefixgate.gateway.routing_index import Removed, Stored

BLOCK = 16
SCOPE = CacheScope("tenant", "model")
HASHER = BlockHasher(b"a key of 16 bytes")
# Round numbers: 1,000 tokens take a second.
ROUND = RoutingSettings(miss_weight=3.0, eviction_weight=1.0, prefill_tokens_per_second=1000, call_seconds=0.01)


def tokens(count: int, *, begin: int = 0) -> list[int]:
    return list(range(begin, begin + count))


def names(token_ids: Sequence[int], scope: CacheScope = SCOPE) -> list[BlockHash]:
    return HASHER.hash_tokens(scope, token_ids)


@dataclass
class Fleet:
    """Workers around a router, and the time."""

    workers: Sequence[str] = ("w0", "w1", "w2", "w3")
    now: float = 0.0
    settings: RoutingSettings = ROUND
    router: PrefixRouter = field(init=False)
    pending: dict[str, PendingPrompts] = field(init=False)
    calls: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.router = PrefixRouter(HASHER, self.settings, lambda: self.now)
        self.pending = {worker: PendingPrompts() for worker in self.workers}
        self.calls = dict.fromkeys(self.workers, 0)
        for worker in self.workers:
            self.holds(worker, [])

    def holds(self, worker: str, token_ids: Sequence[int]) -> None:
        self.router.index.snapshot(worker, "life", 0, {SCOPE.tenant: names(token_ids)})

    def candidates(self, workers: Iterable[str] = ()) -> list[Candidate]:
        return [Candidate(name, self.calls[name], self.pending[name]) for name in workers or self.workers]

    def choose(self, token_ids: Sequence[int], workers: Iterable[str] = (), **modes: Any) -> Choice:
        return self.router.choose(SCOPE, token_ids, self.candidates(workers), **modes)

    def send(self, token_ids: Sequence[int]) -> Choice:
        """Choose, and keep the call in the worker's hands."""
        choice = self.choose(token_ids)
        self.pending[choice.worker].add(len(token_ids) - choice.cached_tokens, self.now)
        self.calls[choice.worker] += 1
        return choice


@dataclass
class Case:
    """A fleet of two, the prompt of 1,600 tokens, and who gets it."""

    story: str
    held: tuple[int, int]
    """Tokens of the prompt that w0 and w1 hold."""
    pending: tuple[int, int]
    """Tokens that they have yet to compute for others."""
    calls: tuple[int, int]
    chosen: str


CASES = [
    Case("all of it is cached there, and nobody is busy", (1600, 0), (0, 0), (0, 0), "w0"),
    Case("some of it is cached there", (0, 160), (0, 0), (0, 0), "w1"),
    Case("both hold some: whoever holds more", (800, 816), (0, 0), (0, 0), "w1"),
    Case("nobody holds any: whoever has less to compute", (0, 0), (500, 400), (0, 0), "w1"),
    Case("nobody holds any and nobody computes: whoever has fewer calls", (0, 0), (0, 0), (3, 2), "w1"),
    # Missing 1,600 costs 4.8 s, so that much is waited for what is cached.
    Case("the wait is worth it", (1600, 0), (4700, 0), (0, 0), "w0"),
    Case("the wait is longer than computing it anew, three times", (1600, 0), (4900, 0), (0, 0), "w1"),
    Case("both are busy: the difference counts", (1600, 0), (9000, 5000), (0, 0), "w0"),
    Case("calls that only generate count a little", (160, 0), (0, 0), (47, 0), "w0"),
    Case("many calls outweigh a short head", (160, 0), (0, 0), (49, 0), "w1"),
    Case("a busy worker with an empty cache does not attract what is new", (0, 0), (3000, 0), (9, 0), "w1"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.story)
def test_the_call_goes(case: Case) -> None:
    fleet = Fleet(("w0", "w1"))
    prompt = tokens(1600)
    for worker, held, pending, calls in zip(fleet.workers, case.held, case.pending, case.calls, strict=True):
        fleet.holds(worker, prompt[:held])
        fleet.pending[worker].add(pending, fleet.now)
        fleet.calls[worker] = calls
    choice = fleet.choose(prompt)
    own = case.held[fleet.workers.index(case.chosen)]
    assert choice == Choice(case.chosen, 1600, min(max(case.held), 1599), min(own, 1599))


def test_a_full_pool_that_turns_over_faster_gives_way_to_one_with_room() -> None:
    fleet = Fleet(("w0", "w1"))
    prompt = tokens(1600)
    fleet.holds("w0", prompt[:800])
    assert fleet.choose(prompt, keeps_blocks=False).worker == "w0"
    stranger = names(tokens(320, begin=9000))
    fleet.router.index.apply("w0", "life", 1, Stored("tenant", stranger))
    fleet.router.index.apply("w0", "life", 2, Removed("tenant", stranger))
    # w0: (3 + 2) x 0.8 s; w1: 3 x 1.6 s.
    assert fleet.choose(prompt, keeps_blocks=False).worker == "w0"
    assert fleet.choose(tokens(3000), keeps_blocks=False).worker == "w1"


def test_equal_prompts_that_nobody_knows_meet_and_different_ones_are_spread() -> None:
    fleet = Fleet()
    chosen: list[str] = []
    for number in range(200):
        prompt = tokens(64, begin=number * 100)
        picks = {fleet.choose(prompt, keeps_blocks=False).worker for _ in range(3)}
        picks.add(fleet.choose(prompt, reversed(fleet.workers), keeps_blocks=False).worker)
        assert len(picks) == 1
        chosen += picks
    assert all(30 < chosen.count(worker) < 70 for worker in fleet.workers)


def test_a_worker_that_leaves_moves_only_what_was_its_own() -> None:
    fleet = Fleet()
    prompts = [tokens(64, begin=number * 100) for number in range(100)]
    before = [fleet.choose(prompt, keeps_blocks=False).worker for prompt in prompts]
    after = [fleet.choose(prompt, fleet.workers[:3], keeps_blocks=False).worker for prompt in prompts]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "w3")
    assert "w3" in before


def test_a_burst_of_equal_prompts_meets_before_the_first_is_computed() -> None:
    fleet = Fleet()
    prompt = tokens(1600)
    first = fleet.send(prompt)
    second = fleet.send(prompt)
    assert (first.cached_tokens, second.worker, second.cached_tokens) == (0, first.worker, 1599)
    # Until it should have been computed, and told, long ago.
    fleet.now = 60.0
    assert fleet.choose(prompt).cached_tokens == 0


@pytest.mark.parametrize("tail", [400, 1200])
def test_sessions_below_one_head_share_it_and_are_spread(tail: int) -> None:
    """A long prompt that all have is no reason to send all to one worker, nor to compute it for each."""
    fleet, head = Fleet(settings=RoutingSettings()), tokens(4000)
    hits = 0
    for number in range(100):
        hits += fleet.send(head + tokens(tail, begin=10_000 + number * 2000)).cached_tokens
    assert max(fleet.calls.values()) <= 2 * min(fleet.calls.values())
    assert hits >= 0.8 * 99 * 4000


def test_who_is_no_candidate_is_not_chosen_but_known() -> None:
    fleet = Fleet()
    prompt = tokens(160)
    fleet.holds("w2", prompt)
    assert fleet.choose(prompt, keeps_blocks=False) == Choice("w2", 160, 159, 159)
    choice = fleet.choose(prompt, ["w0", "w1"])
    assert choice.worker in {"w0", "w1"}
    assert (choice.cached_tokens, choice.reusable_tokens) == (0, 159)


def test_a_lost_worker_is_forgotten_with_what_was_expected_of_it() -> None:
    fleet = Fleet()
    prompt = tokens(160)
    first = fleet.send(prompt)
    fleet.router.forget(first.worker)
    assert fleet.choose(prompt, [first.worker]) == Choice(first.worker, 160, 0, 0)


def test_other_tenants_and_salts_find_nothing() -> None:
    fleet = Fleet()
    prompt = tokens(160)
    fleet.holds("w2", prompt)
    for scope in (CacheScope("other", "model"), CacheScope("tenant", "model", salt="s"), CacheScope("tenant", "two")):
        choice = fleet.router.choose(scope, prompt, fleet.candidates(), keeps_blocks=False)
        assert (choice.cached_tokens, choice.reusable_tokens) == (0, 0)


def test_a_call_that_does_not_read_the_cache_goes_by_load_alone() -> None:
    fleet = Fleet(("w0", "w1"))
    prompt = tokens(160)
    fleet.holds("w0", prompt)
    fleet.calls["w0"] = 1
    assert fleet.choose(prompt, reads_cache=False, keeps_blocks=False) == Choice("w1", 0, 0, 0)
    # What it keeps is expected nevertheless, where it may keep something.
    fleet.calls["w1"] = 2
    assert fleet.choose(prompt, ["w1"], reads_cache=False) == Choice("w1", 0, 0, 0)
    assert fleet.choose(prompt, ["w1"]).cached_tokens == 159


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_prompts_around_one_block(length: int) -> None:
    fleet = Fleet()
    fleet.holds("w1", tokens(16))
    choice = fleet.choose(tokens(length))
    assert choice.cached_tokens == choice.reusable_tokens == {16: 15, 17: 16}.get(length, 0)


def test_a_slower_worker_is_given_less_until_that_is_long_ago() -> None:
    fleet = Fleet(("w0", "w1"))
    fresh = [tokens(64, begin=number * 100) for number in range(40)]
    for _ in range(5):
        fleet.router.observe("w0", 1000, 4.0)
        fleet.router.observe("w1", 1000, 1.0)
    assert {fleet.choose(prompt, keeps_blocks=False).worker for prompt in fresh} == {"w1"}
    fleet.now = 600.0
    assert {fleet.choose(prompt, keeps_blocks=False).worker for prompt in fresh} == {"w0", "w1"}


def test_workers_of_nearly_one_speed_count_as_equals() -> None:
    fleet = Fleet(("w0", "w1"))
    for _ in range(5):
        fleet.router.observe("w0", 1000, 1.1)
        fleet.router.observe("w1", 1000, 1.0)
    fresh = [tokens(64, begin=number * 100) for number in range(40)]
    assert {fleet.choose(prompt, keeps_blocks=False).worker for prompt in fresh} == {"w0", "w1"}
