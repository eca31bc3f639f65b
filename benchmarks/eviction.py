"""What each eviction policy hits on public traces, against LRU and against a cache that knows the future.

    python -m benchmarks.eviction --traces DIR [--json FILE] [--plot FILE.svg] [--quick]

Every trace in DIR (see ``traces`` for the format and where they are published) is replayed from cold with pools of 1,
3, 10 and 30 % of its unique blocks; figures are hit tokens in percent of the prompt tokens that were not skipped.
Requests larger than the pool are skipped by every contender and counted. Every policy is replayed twice, by the
simulator and through the real cache, and the program fails unless both hit the same. The JSON has a key
``trace/percent/policy`` for each figure. ``--quick`` takes each trace's first 2,000 requests. All of it takes some
ten minutes of one core, most of them for the Claude Code trace.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.clairvoyant import clairvoyant
from benchmarks.replay import replay
from benchmarks.simulator import simulate
from benchmarks.svg import Chart, Picture
from benchmarks.traces import PUBLISHED_AT, Trace, load_traces
from prefixgate.cache.adaptive import AdaptivePolicy
from prefixgate.cache.lru import LRUPolicy

PERCENTS = (1, 3, 10, 30)
POLICIES = (LRUPolicy, AdaptivePolicy)
BOUND = "clairvoyant"
GAP = 2.0
"""Points between LRU and the bound from which on a cell counts for the share of the gap that is closed."""
QUICK_REQUESTS = 2000

logger = logging.getLogger("benchmarks.eviction")


@dataclass(frozen=True)
class Cell:
    """One trace with one pool."""

    trace: str
    percent: int
    num_blocks: int
    skipped: int
    hits: Mapping[str, float]
    """Hit percent by policy, and of the bound."""

    @property
    def gain(self) -> float:
        return self.hits[AdaptivePolicy.name] - self.hits[LRUPolicy.name]

    @property
    def gap(self) -> float:
        return self.hits[BOUND] - self.hits[LRUPolicy.name]


def measure(trace: Trace, percent: int) -> Cell:
    """Replay a trace with every contender. Raises RuntimeError where cache and simulator differ."""
    num_blocks = max(1, trace.unique_blocks * percent // 100)
    bound = clairvoyant(trace, num_blocks)
    hits = {}
    for policy in POLICIES:
        simulated = simulate(trace, num_blocks, policy)
        served = replay(trace, num_blocks, policy)
        if simulated != served:
            raise RuntimeError(f"{trace.name} at {percent} %, {policy.name}: {simulated} simulated, {served} served")
        hits[policy.name] = served.hit_percent
        logger.info("%s at %d %%: %s hits %.2f %%", trace.name, percent, policy.name, served.hit_percent)
    return Cell(trace.name, percent, num_blocks, bound.skipped, {**hits, BOUND: bound.hit_percent})


def measure_all(folder: Path, *, quick: bool) -> Iterator[Cell]:
    for trace in load_traces(folder):
        logger.info("%s, published at %s", trace.name, PUBLISHED_AT.get(trace.name, "a place not known here"))
        taken = replace(trace, requests=trace.requests[:QUICK_REQUESTS]) if quick else trace
        for percent in PERCENTS:
            yield measure(taken, percent)


def table(cells: list[Cell]) -> str:
    """A Markdown table of all cells, and the figures that sum them up."""
    lines = [
        "| trace | pool % | blocks | skipped | LRU | adaptive | clairvoyant | gain | of the gap |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        lru, adaptive, bound = (cell.hits[name] for name in (LRUPolicy.name, AdaptivePolicy.name, BOUND))
        share = f"{cell.gain / cell.gap:.2f}" if cell.gap >= GAP else ""
        lines.append(
            f"| {cell.trace} | {cell.percent} | {cell.num_blocks} | {cell.skipped} "
            f"| {lru:.2f} | {adaptive:.2f} | {bound:.2f} | {cell.gain:+.2f} | {share} |"
        )
    wide = [cell for cell in cells if cell.gap >= GAP]
    worst = min(cells, key=lambda cell: cell.gain)
    if wide:
        gain, gap = sum(cell.gain for cell in wide), sum(cell.gap for cell in wide)
        lines += ["", f"Sum of gains {gain:.2f} / sum of gaps {gap:.2f} = {gain / gap:.3f} over {len(wide)} cells."]
    lines += ["", f"Worst cell: {worst.trace} at {worst.percent} %, {worst.gain:+.2f} points."]
    return "\n".join(lines)


def draw(cells: list[Cell]) -> str:
    """One chart for each trace, as SVG."""
    traces = list(dict.fromkeys(cell.trace for cell in cells))
    columns = 3
    picture = Picture(columns * 300 + 40, -(-len(traces) // columns) * 330 + 20)
    for number, trace in enumerate(traces):
        own = [cell for cell in cells if cell.trace == trace]
        series = {
            name: [(float(cell.percent), cell.hits[name]) for cell in own]
            for name in (LRUPolicy.name, AdaptivePolicy.name, BOUND)
        }
        chart = Chart(trace, "pool, % of the trace's unique blocks", series, y_max=100, y_step=20)
        chart.draw(picture, 50 + number % columns * 300, 40 + number // columns * 330, 230, 180)
    return picture.render()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction", description="Compare eviction policies.")
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--plot", type=Path, help="draw the table to this file, as SVG")
    parser.add_argument("--quick", action="store_true", help=f"only each trace's first {QUICK_REQUESTS} requests")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    cells = list(measure_all(arguments.traces, quick=arguments.quick))
    print(table(cells))
    if arguments.json:
        figures = {f"{cell.trace}/{cell.percent}/{name}": hit for cell in cells for name, hit in cell.hits.items()}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    if arguments.plot:
        arguments.plot.write_text(draw(cells))


if __name__ == "__main__":
    main()
