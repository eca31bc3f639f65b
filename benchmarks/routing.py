"""What routing over several workers leaves of the hits that one shared pool would have had.

    python -m benchmarks.routing --traces DIR [--json FILE] [--only NAME] [--quick]

Every trace in DIR (see ``traces`` for the format and where they are published) is sent to 8 simulated workers with a
leaf-first LRU pool each (``fleet`` has the load model), from cold, by each contender:

- *shared*: no routing but one pool of the same total size, the bound;
- *round robin*: in turn;
- *sticky*: by a hash of the conversation's number;
- *first block*: by a consistent hash of the prompt's first block;
- *longest match*: whoever holds most of the prompt or will soon, of equals the one with the least to compute;
- *ours*: ``gateway/router.py`` with its index, hearing what pools store and evict;
- *ours, deaf*: the same, hearing of no eviction.

All pools together are 10 and 30 % of the trace's unique blocks. Time is scaled such that one shared pool would load
the workers' prefill to ``--load`` (0.35). Calls larger than one worker's pool are left out for everyone and counted.
The JSON has for each trace, percentage and contender the keys ``trace/percent/contender/hits`` (percent of prompt
tokens), ``.../imbalance`` (prompt tokens of the worker that got most, over the mean), ``.../first_token_p95`` (seconds)
and, of ours, ``.../share`` (hits in percent of the shared pool's). ``--quick`` takes each trace's first 2,000 requests.
"""

import argparse
import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_64_intdigest

from benchmarks.fleet import TOKENS_PER_SECOND, Arrival, Contender, Outcome, run
from benchmarks.simulator import simulate
from benchmarks.traces import PUBLISHED_AT, Trace, load_traces
from prefixgate.cache.hashing import BlockHash, BlockHasher
from prefixgate.cache.lru import LRUPolicy
from prefixgate.config.routing_settings import RoutingSettings
from prefixgate.gateway.candidate import Candidate
from prefixgate.gateway.pending_prompts import PendingPrompts
from prefixgate.gateway.router import PrefixRouter
from prefixgate.gateway.routing_index import Removed, Stored

NUM_WORKERS = 8
PERCENTS = (10, 30)
QUICK_REQUESTS = 2000
TENANT = "tenant"

logger = logging.getLogger("benchmarks.routing")


class Blind:
    """A contender that hears nothing."""

    def computed(self, at: float, worker: int, removed: list[BlockHash], stored: list[BlockHash]) -> None:
        pass

    def ended(self, worker: int) -> None:
        pass


class RoundRobin(Blind):
    def __init__(self) -> None:
        self._turn = 0

    def choose(self, arrival: Arrival) -> int:
        self._turn += 1
        return self._turn % NUM_WORKERS


class Sticky(Blind):
    def choose(self, arrival: Arrival) -> int:
        return xxh3_64_intdigest(arrival.request.conversation.to_bytes(8, "little")) % NUM_WORKERS


class FirstBlock(Blind):
    def choose(self, arrival: Arrival) -> int:
        key = arrival.names[0] if arrival.names else b""
        return max(range(NUM_WORKERS), key=lambda worker: xxh3_64_intdigest(key + bytes([worker])))


class Ours:
    """The gateway's router, with what the gateway would tell it."""

    def __init__(self, trace: Trace, settings: RoutingSettings, *, hears_evictions: bool = True) -> None:
        self._now = 0.0
        hasher = BlockHasher(b"a key for benchmarks", block_size=trace.block_size)
        self.router = PrefixRouter(hasher, settings, lambda: self._now)
        self._hears_evictions = hears_evictions
        self._names = [f"worker-{number}" for number in range(NUM_WORKERS)]
        self._events = [0] * NUM_WORKERS
        self._pending = [PendingPrompts() for _ in range(NUM_WORKERS)]
        self._prompts: list[deque[int]] = [deque() for _ in range(NUM_WORKERS)]
        self._calls = [0] * NUM_WORKERS
        for name in self._names:
            self.router.index.snapshot(name, "life", 0, {})

    def choose(self, arrival: Arrival) -> int:
        self._now, tokens = arrival.at, arrival.request.prompt_tokens
        candidates = list(map(Candidate, self._names, self._calls, self._pending))
        choice = self.router.choose_by_hashes(TENANT, arrival.names, tokens, candidates)
        worker = self._names.index(choice.worker)
        self._prompts[worker].append(self._pending[worker].add(tokens - choice.cached_tokens, self._now))
        self._calls[worker] += 1
        return worker

    def computed(self, at: float, worker: int, removed: list[BlockHash], stored: list[BlockHash]) -> None:
        self._now = at
        self._pending[worker].remove(self._prompts[worker].popleft(), self._now)
        if self._hears_evictions:
            self._apply(worker, Removed(TENANT, removed))
        self._apply(worker, Stored(TENANT, stored))

    def _apply(self, worker: int, event: Stored | Removed) -> None:
        self._events[worker] += 1
        assert self.router.index.apply(self._names[worker], "life", self._events[worker], event)

    def ended(self, worker: int) -> None:
        self._calls[worker] -= 1


@dataclass(frozen=True)
class Cell:
    """One trace with pools of one size."""

    trace: str
    percent: int
    num_blocks: int
    """Of one worker."""
    skipped: int
    shared: float
    """Hit percent of one pool of the size of all."""
    outcomes: Mapping[str, Outcome]

    def share(self, contender: str) -> float:
        return 100 * self.outcomes[contender].hit_percent / self.shared if self.shared else 100.0


def contenders(settings: RoutingSettings) -> Mapping[str, Callable[[Trace], Contender]]:
    hits_alone = replace(settings, miss_weight=1e9, eviction_weight=0, call_seconds=0)
    return {
        "round robin": lambda trace: RoundRobin(),
        "sticky": lambda trace: Sticky(),
        "first block": lambda trace: FirstBlock(),
        "longest match": lambda trace: Ours(trace, hits_alone),
        "ours": lambda trace: Ours(trace, settings),
        "ours, deaf": lambda trace: Ours(trace, settings, hears_evictions=False),
    }


def measure(trace: Trace, percent: int, load: float, settings: RoutingSettings) -> Cell:
    """Send a trace through every contender."""
    num_blocks = max(1, trace.unique_blocks * percent // 100 // NUM_WORKERS)
    fitting = replace(trace, requests=[r for r in trace.requests if 0 < r.num_blocks <= num_blocks])
    shared = simulate(fitting, num_blocks * NUM_WORKERS, LRUPolicy)
    seconds = (shared.prompt_tokens - shared.hit_tokens) / (NUM_WORKERS * TOKENS_PER_SECOND * load)
    outcomes = {}
    for name, make in contenders(settings).items():
        outcomes[name] = run(fitting, seconds, NUM_WORKERS, num_blocks, make(fitting))
        logger.info("%s at %d %%: %s hits %.2f %%", trace.name, percent, name, outcomes[name].hit_percent)
    skipped = len(trace.requests) - len(fitting.requests)
    return Cell(trace.name, percent, num_blocks, skipped, shared.hit_percent, outcomes)


def measure_all(arguments: argparse.Namespace) -> Iterator[Cell]:
    settings = RoutingSettings()
    for trace in load_traces(arguments.traces):
        if arguments.only not in ("", trace.name):
            continue
        logger.info("%s, published at %s", trace.name, PUBLISHED_AT.get(trace.name, "a place not known here"))
        taken = replace(trace, requests=trace.requests[:QUICK_REQUESTS]) if arguments.quick else trace
        for percent in PERCENTS:
            yield measure(taken, percent, arguments.load, settings)


def table(cells: list[Cell]) -> str:
    """A Markdown table: hits in percent, and in brackets the imbalance."""
    names = list(cells[0].outcomes)
    lines = [
        "| trace | pool % | left out | shared | " + " | ".join(names) + " | ours of shared |",
        "|---" * (len(names) + 5) + "|",
    ]
    for cell in cells:
        figures = " | ".join(f"{one.hit_percent:.1f} ({one.imbalance:.2f})" for one in cell.outcomes.values())
        lines.append(
            f"| {cell.trace} | {cell.percent} | {cell.skipped} | {cell.shared:.1f} | {figures} "
            f"| {cell.share('ours'):.1f} % |"
        )
    lines += ["", "Seconds to the first token, 95th percentile:", ""]
    lines += ["| trace | pool % | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for cell in cells:
        waits = " | ".join(f"{percentile(one.first_token_seconds, 95):.2f}" for one in cell.outcomes.values())
        lines.append(f"| {cell.trace} | {cell.percent} | {waits} |")
    worst = min(cells, key=lambda cell: cell.share("ours"))
    return "\n".join([*lines, "", f"Least: {worst.share('ours'):.1f} % on {worst.trace} at {worst.percent} %."])


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[(len(values) - 1) * percent // 100]


def figures(cells: list[Cell]) -> dict[str, float]:
    """Every figure by its key."""
    found = {}
    for cell in cells:
        prefix = f"{cell.trace}/{cell.percent}"
        found[f"{prefix}/shared/hits"] = cell.shared
        for name, outcome in cell.outcomes.items():
            found[f"{prefix}/{name}/hits"] = outcome.hit_percent
            found[f"{prefix}/{name}/imbalance"] = outcome.imbalance
            found[f"{prefix}/{name}/first_token_p95"] = percentile(outcome.first_token_seconds, 95)
        found[f"{prefix}/ours/share"] = cell.share("ours")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description="Compare routing policies.")
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--only", default="", help="only the trace of this name")
    parser.add_argument("--load", type=float, default=0.35, help="load of the prefill servers behind one shared pool")
    parser.add_argument("--quick", action="store_true", help=f"only each trace's first {QUICK_REQUESTS} requests")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    cells = list(measure_all(arguments))
    if not cells:
        parser.error(f"--only: no trace in {arguments.traces} is named {arguments.only}")
    print(table(cells))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures(cells), indent=1) + "\n")


if __name__ == "__main__":
    main()
