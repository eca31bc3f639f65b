"""What a block size wastes at either end, and how many sequences a pool holds.

    python -m benchmarks.waste --traces DIR [--json FILE] [--plot FILE]

The traces are files of gzip'd JSON lines in time order, each with ``input_length`` and ``output_length`` in tokens and,
where the trace has them, ``conv`` (a conversation's number) and ``blocks`` (runs [start, count] of prefix-chained
block ids: equal ids, equal text up to there). Where they are published:

- Azure LLM inference traces 2023, code and conversation: github.com/Azure/AzurePublicDataset, CC-BY 4.0.
- Mooncake, conversation: github.com/kvcache-ai/Mooncake, FAST25-release, Apache-2.0.
- RAGPulse: github.com/flashserve/RAGPulse, MIT.
- tau-bench, airline, gpt-4o: github.com/sierra-research/tau-bench, MIT.
- LMCache agent traces, mini-SWE and MAG: github.com/LMCache/lmcache-agent-trace, Apache-2.0.

Keys of the JSON file: ``waste/TRACE/BLOCK`` (percent of held slots), ``waste_slots/TRACE/BLOCK`` (mean for a sequence),
``cost/MEASURE/BLOCK``, ``hits/TRACE/BLOCK`` (percent of prompt tokens), ``held/TRACE/HOW`` (sequences).
"""

import argparse
import gc
import gzip
import json
import random
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import ceil
from pathlib import Path
from time import thread_time
from typing import NamedTuple, TypeVar

from benchmarks.capacity import POOL_TOKENS, Call, blocks_for, capacity, worked_example
from benchmarks.svg import SERIES, Chart, Picture
from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.hashing import BLOCK_SIZE, BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache

SIZES = (1, 4, 16, 64, 256)
FINE_SIZES = (16, 32, 64, 128, 256, 512)
WASTE_SIZES = (1, 4, *FINE_SIZES)
SCOPE = CacheScope("tenant", "model@0000:float16")
KEY = b"a key for benchmarks"
DECODED = 1024
"""Tokens by which a running sequence grows where decoding is timed."""
T = TypeVar("T")


class Source(NamedTuple):
    """A trace that can be read here."""

    name: str
    file: str
    block: int = 0
    """Tokens in one of its blocks; 0 where it has none."""


SOURCES = (
    Source("Azure conversation", "azure2023_conv.lengths.jsonl.gz"),
    Source("Azure code", "azure2023_code.lengths.jsonl.gz"),
    Source("Mooncake conversation", "mooncake_conversation.b512.jsonl.gz", 512),
    Source("RAGPulse", "ragpulse.b16.jsonl.gz", 16),
    Source("tau airline", "tau_airline_io.b16.jsonl.gz", 16),
    Source("mini-SWE agent", "lmcache_miniswe_io.b16.jsonl.gz", 16),
    Source("MAG agent", "lmcache_magagent_io.b16.jsonl.gz", 16),
)


def read(folder: Path, source: Source) -> list[Call]:
    """Read a trace; empty where its file is not in the folder."""
    path = folder / source.file
    if not path.exists():
        return []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [
        Call(r["input_length"], r["output_length"], r.get("conv"), list(_expand(r.get("blocks", ())))) for r in records
    ]


def _expand(runs: Iterable[Sequence[int]]) -> Iterator[int]:
    return chain.from_iterable(range(start, start + count) for start, count in runs)


# Slots that hold nothing


def waste(calls: Sequence[Call], size: int) -> tuple[float, float]:
    """Slots of the last blocks that sequences end without having written: mean, and percent of all slots held."""
    held = [blocks_for(call.slots, size) * size for call in calls]
    empty = sum(held) - sum(call.slots for call in calls)
    return empty / len(calls), 100 * empty / sum(held)


# What a block costs, whatever is in it


def costs(size: int, tokens: int, repeats: int) -> dict[str, float]:
    """CPU time and memory of the cache's own structures for each token of a long prompt."""
    hasher = BlockHasher(KEY, block_size=size)
    prompt = random.Random(1).choices(range(128_000), k=tokens)
    pool = 2 * blocks_for(tokens, size) + 1
    cache = PrefixCache(pool, hasher)
    _serve(cache, prompt)
    return {
        "hash_us": _fastest(lambda _: hasher.hash_tokens(SCOPE, prompt), int, repeats) / tokens,
        "cold_us": _fastest(lambda cold: _serve(cold, prompt), lambda: PrefixCache(pool, hasher), repeats) / tokens,
        "warm_us": _fastest(lambda _: _serve(cache, prompt), int, repeats) / tokens,
        "decode_us": _fastest(_decode, lambda: _running(hasher), repeats) / DECODED,
        "bytes": _bytes(hasher, prompt) / tokens,
        "table": blocks_for(tokens, size),
    }


def _admit(cache: PrefixCache, prompt: list[int], new: int) -> BlockTable:
    admission = cache.admit(SCOPE, prompt, max_new_tokens=new)
    assert admission is not None
    cache.run_plan(lambda plan: None)
    cache.publish(admission.table, len(prompt))
    return admission.table


def _serve(cache: PrefixCache, prompt: list[int]) -> None:
    cache.release(_admit(cache, prompt, 1), len(prompt))


def _running(hasher: BlockHasher) -> tuple[PrefixCache, BlockTable]:
    cache = PrefixCache(blocks_for(2 * DECODED, hasher.block_size), hasher)
    return cache, _admit(cache, list(range(DECODED)), DECODED + 1)


def _decode(running: tuple[PrefixCache, BlockTable]) -> None:
    """Grow one sequence by as many tokens as its prompt has, a token in each step."""
    cache, table = running
    for token in range(DECODED, 2 * DECODED):
        table.token_ids.append(token)
        cache.writable(table, token, token + 1)
        cache.publish(table, token + 1)


def _bytes(hasher: BlockHasher, prompt: list[int]) -> int:
    """Memory that a cache takes with one prompt in it, its pool no larger than that."""
    tracemalloc.start()
    cache = PrefixCache(blocks_for(len(prompt), hasher.block_size), hasher)
    _serve(cache, prompt)
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return taken


def _fastest(run: Callable[[T], object], setup: Callable[[], T], repeats: int) -> float:
    """CPU time of this thread in microseconds; the fastest run, since what else a machine does only adds."""
    figures = []
    for _ in range(repeats):
        subject = setup()
        gc.collect()
        begin = thread_time()
        run(subject)
        figures.append(thread_time() - begin)
    return 1e6 * min(figures)


# What coarse blocks cannot share


def whole_block_hits(calls: Sequence[Call], block: int, size: int) -> float:
    """Percent of prompt tokens that whole blocks of ``size`` hit, with nothing ever evicted and outputs kept.

    Chained ids make it short: the last id inside a coarse block names the block and all before it.
    """
    step, known, hit, asked = size // block, set[int](), 0, 0
    for call in calls:
        names = call.blocks[step - 1 :: step]
        usable = (call.input_length - 1) // size
        found = next((i for i, name in enumerate(names[:usable]) if name not in known), min(usable, len(names)))
        hit += found * size
        asked += call.input_length
        known.update(names)
    return 100 * hit / asked


# Output


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def draw(figures: dict[str, float]) -> str:
    """Three charts over the block size: empty slots, CPU time, what can be shared."""
    picture = Picture(960, 410)
    empty, hits = _series(figures, "waste", SOURCES[:5]), _series(figures, "hits", SOURCES[3:])
    names = {"cold_us": "cold request", "warm_us": "hit", "hash_us": "hashing alone"}
    times = {name: [(float(size), figures[f"cost/{key}/{size}"]) for size in SIZES] for key, name in names.items()}
    slowest = max(y for points in times.values() for _, y in points)
    colours = dict(zip((source.name for source in SOURCES), [*SERIES, "#777777"], strict=True))
    where = "tokens in a block"
    for left, chart in (
        (40, Chart("Held slots that stay empty, %", where, empty, y_max=15, y_step=3, colours=colours)),
        (360, Chart("CPU µs for each token", where, times, y_max=ceil(5 * slowest) / 5, y_step=0.2)),
        (680, Chart("Prompt tokens hit in whole blocks, %", where, hits, y_max=100, y_step=20, colours=colours)),
    ):
        if chart.series:
            chart.draw(picture, left, 40, 250, 230)
    return picture.render()


def _series(figures: dict[str, float], what: str, sources: Sequence[Source]) -> dict[str, list[tuple[float, float]]]:
    keys = {source.name: [(size, f"{what}/{source.name}/{size}") for size in WASTE_SIZES] for source in sources}
    found = {name: [(float(x), figures[key]) for x, key in of if key in figures] for name, of in keys.items()}
    return {name: points for name, points in found.items() if points}


def measure(folder: Path, *, tokens: int, repeats: int, starts: int) -> dict[str, float]:
    """Measure all that the tables show. Traces that are not in the folder are left out."""
    figures: dict[str, float] = {}
    for source in SOURCES:
        calls = read(folder, source)
        if not calls:
            continue
        for size in WASTE_SIZES:
            figures[f"waste_slots/{source.name}/{size}"], figures[f"waste/{source.name}/{size}"] = waste(calls, size)
        if source.block == BLOCK_SIZE:
            for size in FINE_SIZES:
                figures[f"hits/{source.name}/{size}"] = whole_block_hits(calls, source.block, size)
        try:
            found = capacity(calls, source.block, starts)
        except ValueError:
            continue
        figures.update({f"held/{source.name}/{how}": number for how, number in found.items()})
    for size in SIZES:
        figures.update({f"cost/{key}/{size}": number for key, number in costs(size, tokens, repeats).items()})
    return figures


def report(figures: dict[str, float]) -> None:
    """Print the tables."""
    names = [source.name for source in SOURCES]
    print("Slots that stay empty: mean for a sequence, and percent of the slots held\n")
    sizes = (1, 16, 64, 256)
    rows = [
        [name, *(f"{figures[f'waste_slots/{name}/{s}']:.1f} ({figures[f'waste/{name}/{s}']:.2f} %)" for s in sizes)]
        for name in names
        if f"waste/{name}/1" in figures
    ]
    table(["trace", *map(str, sizes)], rows)
    print("For each token, by block size: CPU time in us, bytes outside the pool; entries of the table\n")
    keys = ("hash_us", "cold_us", "warm_us", "decode_us", "bytes", "table")
    table(["block", *keys], [[str(s), *(f"{figures[f'cost/{key}/{s}']:.3g}" for key in keys)] for s in SIZES])
    print("Prompt tokens that whole blocks hit, percent, nothing evicted\n")
    found = [name for name in names if f"hits/{name}/16" in figures]
    table(
        ["trace", *map(str, FINE_SIZES)],
        [[name, *(f"{figures[f'hits/{name}/{size}']:.1f}" for size in FINE_SIZES)] for name in found],
    )
    print(f"Sequences side by side in {POOL_TOKENS} tokens\n")
    how = ("mean_tokens", "too_long", "reserved_longest", "fitting", "fitting_empty", "paged", "promised", "shared")
    found = [name for name in names if f"held/{name}/paged" in figures]
    table(["trace", *how], [[name, *(f"{figures[f'held/{name}/{key}']:.0f}" for key in how)] for name in found])
    print(f"350 tokens each: {worked_example(350)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a block size wastes, and how many sequences a pool holds.")
    parser.add_argument("--traces", type=Path, required=True, help="folder with the traces")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw them here, as SVG")
    parser.add_argument("--tokens", type=int, default=32_768, help="length of the prompt whose costs are measured")
    parser.add_argument("--repeats", type=int, default=7, help="of which the fastest counts")
    parser.add_argument("--starts", type=int, default=200, help="points of a trace from which the pool is filled")
    options = parser.parse_args(arguments)
    figures = measure(options.traces, tokens=options.tokens, repeats=options.repeats, starts=options.starts)
    report(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        options.plot.write_text(draw(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
