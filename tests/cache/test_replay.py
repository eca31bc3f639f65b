"""The real cache hits what an independent simulator hits, for every policy, on a trace made here."""

import random
from collections.abc import Callable

import pytest

from benchmarks.clairvoyant import clairvoyant, least_recent
from benchmarks.replay import replay
from benchmarks.simulator import simulate
from benchmarks.traces import Trace, TraceRequest
from prefixgate.cache.adaptive import AdaptivePolicy
from prefixgate.cache.eviction import EvictionPolicy
from prefixgate.cache.lru import LRUPolicy

Node = tuple[int, ...]


def conversations(seed: int) -> Trace:
    """Conversations of several turns below a few system prompts, with think times; some fork, some are cut short."""
    choice = random.Random(seed)
    arrivals: list[tuple[float, list[Node]]] = []
    for number in range(150):
        now = choice.random() * 1000
        system = choice.randrange(3)
        path: list[Node] = [(system, part) for part in range(4)]
        while True:
            path = path[: len(path) - choice.choice([0, 0, 0, 1])]
            path = path + [(number, len(arrivals), part) for part in range(choice.randint(1, 12))]
            arrivals.append((now, list(path)))
            if choice.random() < 0.3:
                break
            now += choice.expovariate(1 / 40)
    numbers: dict[tuple[int, Node], int] = {}
    requests = []
    for _, path in sorted(arrivals, key=lambda arrival: arrival[0]):
        above, ids = -1, []
        for node in path:
            above = numbers.setdefault((above, node), len(numbers))
            ids.append(above)
        # The last prompt block is not full, and one block more is output.
        requests.append(TraceRequest(len(ids) * 16 - 20, len(ids) - 1, len(ids), [[block, 1] for block in ids]))
    return Trace("conversations", 16, requests)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return conversations(1)


@pytest.mark.parametrize("policy", [LRUPolicy, AdaptivePolicy])
@pytest.mark.parametrize("blocks", [20, 60, 150, 600])
def test_cache_and_simulator_hit_the_same(
    trace: Trace, blocks: int, policy: Callable[[int, Callable[[int], bool]], EvictionPolicy]
) -> None:
    simulated = simulate(trace, blocks, policy)
    assert replay(trace, blocks, policy) == simulated
    assert simulated.hit_tokens > 0


@pytest.mark.parametrize("blocks", [20, 60, 150, 600])
def test_the_lru_policy_is_lru_and_no_policy_beats_the_bound(trace: Trace, blocks: int) -> None:
    recent, bound = least_recent(trace, blocks), clairvoyant(trace, blocks)
    assert simulate(trace, blocks, LRUPolicy) == recent
    assert recent.hit_tokens < bound.hit_tokens or recent.hit_percent > 60
    assert simulate(trace, blocks, AdaptivePolicy).hit_tokens <= bound.hit_tokens


def test_requests_larger_than_the_pool_are_skipped_by_all(trace: Trace) -> None:
    larger = sum(request.num_blocks > 20 for request in trace.requests)
    assert larger > 0
    for result in (simulate(trace, 20, LRUPolicy), replay(trace, 20, AdaptivePolicy), clairvoyant(trace, 20)):
        assert result.skipped == larger
        assert result.prompt_tokens == sum(r.prompt_tokens for r in trace.requests if r.num_blocks <= 20)
