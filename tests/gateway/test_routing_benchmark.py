"""The benchmark of routing, on a small trace made here: what it measures is what it says."""

import gzip
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import routing
from benchmarks.fleet import Arrival, run
from benchmarks.routing import NUM_WORKERS, Blind, Ours, RoundRobin, measure
from benchmarks.simulator import simulate
from benchmarks.traces import Trace, load_traces
from prefixgate.cache.hashing import BlockHash
from prefixgate.cache.lru import LRUPolicy
from prefixgate.config.routing_settings import RoutingSettings


def write_trace(folder: Path, *, conversations: int = 120, seed: int = 1) -> None:
    """Write a trace of conversations below one system prompt, each turn of a few new blocks."""
    choice = random.Random(seed)
    calls: list[tuple[float, int, int]] = []
    for number in range(conversations):
        now = choice.random() * 600_000
        for turn in range(choice.randint(1, 8)):
            calls.append((now, number, turn))
            now += choice.expovariate(1 / 20_000)
    paths: dict[int, list[int]] = {}
    fresh = 4
    with gzip.open(folder / "made.b16.jsonl.gz", "wt") as file:
        for at, number, _ in sorted(calls):
            path = paths.setdefault(number, [0, 1, 2, 3])
            length = choice.randint(1, 10)
            path += range(fresh, fresh + length)
            fresh += length
            line = {
                "t": int(at),
                "input_length": len(path) * 16,
                "output_length": 20,
                "conv": number,
                "blocks": [[block, 1] for block in path],
            }
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    write_trace(tmp_path)
    (found,) = load_traces(tmp_path)
    return found


def test_ours_keeps_most_of_what_one_pool_hits_and_round_robin_does_not(trace: Trace) -> None:
    cell = measure(trace, 40, 0.35, RoutingSettings())
    assert cell.share("ours") > 90 > cell.share("round robin")
    assert cell.outcomes["first block"].imbalance == pytest.approx(NUM_WORKERS)
    assert cell.outcomes["ours"].imbalance < 2
    assert all(len(one.first_token_seconds) == len(trace.requests) - cell.skipped for one in cell.outcomes.values())


def test_a_fleet_of_one_hits_what_the_pool_hits(trace: Trace) -> None:
    class First(Blind):
        def choose(self, arrival: Arrival) -> int:
            return 0

    for blocks in (100, 300):
        outcome = run(trace, 100.0, 1, blocks, First())
        assert outcome.hit_percent == pytest.approx(simulate(trace, blocks, LRUPolicy).hit_percent)
        assert outcome.imbalance == 1


def test_time_is_scaled_to_the_load(trace: Trace) -> None:
    waits = [
        sum(run(trace, seconds, NUM_WORKERS, 300, RoundRobin()).first_token_seconds) for seconds in (0.1, 10.0, 1000.0)
    ]
    assert waits[0] > waits[1] > waits[2]


def test_the_index_of_the_benchmark_holds_what_the_pools_hold(trace: Trace) -> None:
    class Checked(Ours):
        held: tuple[set[BlockHash], ...] = tuple(set() for _ in range(NUM_WORKERS))

        def computed(self, at: float, worker: int, removed: list[BlockHash], stored: list[BlockHash]) -> None:
            super().computed(at, worker, removed, stored)
            self.held[worker].difference_update(removed)
            self.held[worker].update(stored)
            assert self.router.index.num_blocks(f"worker-{worker}") == len(self.held[worker]) <= 100

    contender = Checked(trace, RoutingSettings())
    run(trace, 100.0, NUM_WORKERS, 100, contender)
    assert any(contender.held)


def test_it_prints_a_table_and_writes_the_keys_that_its_head_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path)
    arguments: Sequence[str] = ["routing", "--traces", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    routing.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("|") for line in lines if line.startswith("| made |")] == [12, 12, 9, 9]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["made/30/shared/hits"] >= figures["made/30/round robin/hits"]
    for contender in ("round robin", "sticky", "first block", "longest match", "ours", "ours, deaf"):
        assert {f"made/10/{contender}/{figure}" for figure in ("hits", "imbalance", "first_token_p95")} <= set(figures)
    assert figures["made/30/ours/share"] == pytest.approx(
        100 * figures["made/30/ours/hits"] / figures["made/30/shared/hits"]
    )
