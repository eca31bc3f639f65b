"""The index is what its workers say, or empty: against sets that are kept beside it, whatever is lost on the way."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.cache.events import Cleared as CacheCleared
from prefixgate.cache.events import Event as CacheEvent
from prefixgate.cache.events import Stored as CacheStored
from prefixgate.cache.hashing import BlockHash, BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.gateway.predictions import Predictions
from prefixgate.gateway.routing_index import Cleared, Event, Prefix, Removed, RoutingIndex, Stored
from tests.counts import scaled

TENANTS = ("a", "b")


def path(tenant: str, steps: str) -> list[BlockHash]:
    """Name the blocks of a path through a tenant's tree."""
    return [BlockHash(f"{tenant}{steps[: end + 1]}".encode()) for end in range(len(steps))]


def index() -> RoutingIndex:
    return RoutingIndex(Predictions(lambda: 0.0))


@dataclass
class Worker:
    """What a worker holds, what it has said so far, and what a right index knows of it."""

    life: int = 0
    held: dict[str, set[str]] = field(default_factory=lambda: {tenant: set() for tenant in TENANTS})
    """Paths by tenant; with each also all that it begins with."""
    log: list[Event] = field(default_factory=list)
    known: dict[str, set[BlockHash]] = field(default_factory=dict)
    told: int | None = None
    """Number of the last event that is part of ``known``; None where nothing is known."""

    def store(self, tenant: str, steps: str) -> None:
        new = [steps[: end + 1] for end in range(len(steps)) if steps[: end + 1] not in self.held[tenant]]
        self.held[tenant].update(new)
        self.log.append(Stored(tenant, [BlockHash(f"{tenant}{one}".encode()) for one in new]))

    def evict(self, tenant: str, choice: random.Random) -> None:
        held = self.held[tenant]
        leaves = sorted(one for one in held if not any(other != one and other.startswith(one) for other in held))
        if leaves:
            gone = choice.choice(leaves)
            held.discard(gone)
            self.log.append(Removed(tenant, [BlockHash(f"{tenant}{gone}".encode())]))

    def clear(self, tenant: str) -> None:
        for name in [tenant] if tenant else TENANTS:
            self.held[name] = set()
        self.log.append(Cleared(tenant))

    def restart(self) -> None:
        self.life += 1
        self.log = []
        self.held = {tenant: set() for tenant in TENANTS}

    def learn(self, event: Event) -> None:
        """Do to the sets what the event says."""
        if isinstance(event, Stored):
            self.known.setdefault(event.tenant, set()).update(event.hashes)
        elif isinstance(event, Removed):
            self.known.setdefault(event.tenant, set()).difference_update(event.hashes)
        elif event.tenant:
            self.known.pop(event.tenant, None)
        else:
            self.known.clear()

    def forget(self) -> None:
        self.known, self.told = {}, None


class Wire:
    """Carries events to an index, and to the sets; loses some, repeats some."""

    def __init__(self, choice: random.Random) -> None:
        self.choice = choice
        self.index = index()
        self.workers = {"x": Worker(), "y": Worker()}
        self.lives: dict[str, int] = {}
        """Of the picture that the index has."""

    def snapshot(self, name: str) -> None:
        worker = self.workers[name]
        held = {t: {BlockHash(f"{t}{one}".encode()) for one in paths} for t, paths in worker.held.items()}
        self.index.snapshot(name, str(worker.life), len(worker.log), held)
        worker.known, worker.told = {tenant: set(hashes) for tenant, hashes in held.items()}, len(worker.log)
        self.lives[name] = worker.life

    def deliver(self, name: str, skip: int) -> None:
        """Bring the next event after those that are known, or a later one, or an earlier one again."""
        worker = self.workers[name]
        number = (worker.told or 0) + 1 + skip
        if not 1 <= number <= len(worker.log):
            return
        event = worker.log[number - 1]
        taken = self.index.apply(name, str(worker.life), number, event)
        follows = worker.told is not None and self.lives[name] == worker.life and skip <= 0
        assert taken == follows
        if not follows:
            worker.forget()
        elif skip == 0:
            worker.learn(event)
            worker.told = number

    def check(self) -> None:
        for name, worker in self.workers.items():
            assert self.index.num_blocks(name) == sum(map(len, worker.known.values()))
            for tenant in TENANTS:
                steps = "".join(self.choice.choices("01", k=5))
                known = worker.known.get(tenant, set())
                longest = 0
                for block_hash in path(tenant, steps):
                    if block_hash not in known:
                        break
                    longest += 1
                assert self.index.prefix(name, tenant, path(tenant, steps)) == Prefix(longest, longest)

    def step(self) -> None:
        name = self.choice.choice(["x", "y"])
        worker, tenant = self.workers[name], self.choice.choice(TENANTS)
        match self.choice.choices(
            ["store", "evict", "clear", "clear all", "deliver", "skip", "repeat", "snapshot", "restart", "forget"],
            [20, 15, 1, 1, 40, 1, 3, 4, 1, 1],
        )[0]:
            case "store":
                worker.store(tenant, "".join(self.choice.choices("01", k=self.choice.randint(1, 5))))
            case "evict":
                worker.evict(tenant, self.choice)
            case "clear":
                worker.clear(tenant)
            case "clear all":
                worker.clear("")
            case "deliver":
                self.deliver(name, 0)
            case "skip":
                self.deliver(name, self.choice.randint(1, 2))
            case "repeat":
                self.deliver(name, -self.choice.randint(1, 3))
            case "snapshot":
                self.snapshot(name)
            case "restart":
                worker.restart()
                if self.choice.random() < 0.5:
                    # The stream broke; else the first event of the new life is what tells.
                    self.index.forget(name)
                    worker.forget()
            case _:
                self.index.forget(name)
                worker.forget()


@settings(max_examples=scaled(4000), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_index_is_what_workers_said_whatever_gets_lost(seed: int) -> None:
    wire = Wire(random.Random(seed))
    for _ in range(60):
        wire.step()
        wire.check()


def test_an_index_that_was_told_is_not_always_empty() -> None:
    wire = Wire(random.Random(0))
    most = 0
    for _ in range(2000):
        wire.step()
        most = max(most, wire.index.num_blocks("x"))
    assert most > 5


def _of_the_cache(event: CacheEvent) -> Event:
    if isinstance(event, CacheCleared):
        return Cleared(event.tenant)
    return (Stored if isinstance(event, CacheStored) else Removed)(event.tenant, event.hashes)


@settings(max_examples=scaled(1000), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_events_of_the_cache_keep_the_index_equal_to_it(seed: int) -> None:
    choice = random.Random(seed)
    hasher = BlockHasher(b"a key of 16 bytes", block_size=2)
    cache = PrefixCache(12, hasher, incarnation="life")
    scopes = [CacheScope(tenant, "model") for tenant in TENANTS]
    picture, told = index(), 0
    picture.snapshot("x", "life", 0, {})
    for _ in range(40):
        scope, ids = choice.choice(scopes), choice.choices([0, 1], k=choice.randint(1, 12))
        if choice.random() < 0.05:
            cache.flush(scope.tenant)
        elif (admission := cache.admit(scope, ids, max_new_tokens=1)) is not None:
            cache.run_plan(lambda plan: None)
            cache.release(admission.table, len(ids))
        for number, event in cache.events.since(told):
            assert picture.apply("x", "life", number, _of_the_cache(event))
            told = number
        for scope in scopes:
            hashes = hasher.hash_tokens(scope, choice.choices([0, 1], k=10))
            there = [cache.index.find(block_hash) is not None for block_hash in hashes]
            assert picture.prefix("x", scope.tenant, hashes).held == (there.index(False) if False in there else 5)


def test_events_of_a_worker_without_a_snapshot_are_not_taken() -> None:
    picture = index()
    assert not picture.apply("x", "life", 1, Stored("a", path("a", "0")))
    assert picture.num_blocks("x") == 0


def test_a_restart_in_place_drops_what_the_life_before_held() -> None:
    picture = index()
    picture.snapshot("x", "one", 7, {"a": path("a", "01")})
    assert picture.prefix("x", "a", path("a", "011")).held == 2
    assert not picture.apply("x", "two", 8, Stored("a", path("a", "011")))
    assert picture.prefix("x", "a", path("a", "011")) == Prefix(0, 0)


def test_what_a_tenant_flushed_is_gone_and_others_keep_theirs() -> None:
    predictions = Predictions(lambda: 0.0)
    picture = RoutingIndex(predictions)
    picture.snapshot("x", "life", 0, {"a": path("a", "01"), "b": path("b", "0")})
    predictions.add("x", "a", path("a", "012"), 5.0)
    predictions.add("x", "b", path("b", "01"), 5.0)
    assert picture.apply("x", "life", 1, Cleared("a"))
    assert picture.prefix("x", "a", path("a", "012")) == Prefix(0, 0)
    assert picture.prefix("x", "b", path("b", "01")) == Prefix(1, 2)


def test_pressure_is_the_turnover_beside_that_of_all() -> None:
    picture = index()
    held = {"a": [BlockHash(bytes([number])) for number in range(20)]}
    for worker in "xyz":
        picture.snapshot(worker, "life", 0, held)
    assert picture.pressures("xyz") == {"x": 0, "y": 0, "z": 0}
    # What a tenant flushed tells nothing of how full a pool is.
    picture.apply("z", "life", 1, Removed("a", held["a"][10:], flushed=True))
    assert picture.num_blocks("z") == 10
    assert picture.pressures("xyz") == {"x": 0, "y": 0, "z": 0}
    picture.snapshot("z", "life", 1, held)
    picture.apply("x", "life", 1, Removed("a", held["a"][10:]))
    assert picture.pressures("xyz") == {"x": 3, "y": 0, "z": 0}
    # Twice as much of a pool that is twice as large is the same turnover.
    picture.apply("y", "life", 1, Stored("a", [BlockHash(bytes([1, number])) for number in range(20)]))
    picture.apply("y", "life", 2, Removed("a", [BlockHash(bytes([1, number])) for number in range(20)]))
    assert picture.pressures("xyz") == pytest.approx({"x": 1.5, "y": 1.5, "z": 0})
    assert picture.pressures(["x"]) == {"x": 1}
    assert picture.pressures(["stranger"]) == {"stranger": 0}


def blocks(tenant: str, numbers: range) -> list[BlockHash]:
    return [BlockHash(f"{tenant}{number}".encode()) for number in numbers]


def test_what_two_workers_both_hold_is_counted_and_of_large_ones_judged_by_a_sample() -> None:
    picture = index()
    picture.snapshot("x", "life", 0, {"a": blocks("a", range(6000)), "b": blocks("b", range(10))})
    picture.snapshot("y", "life", 0, {"a": blocks("a", range(3000, 9000)), "c": blocks("c", range(10))})
    assert picture.overlap("x", "y", 10_000) == picture.overlap("y", "x", 10_000) == 3000
    # Half of x's is there too: of 1,000 that are looked for, within six deviations of 500.
    assert 2400 < picture.overlap("x", "y", 1000) < 3600
    assert picture.overlap("x", "x", 10_000) == 6010
    assert picture.overlap("x", "stranger", 10_000) == 0
