"""What the cache costs: CPU time of the thread for the operations of an engine, on seeded work.

    python -m benchmarks.cache_core [--json FILE] [--repeats N]

Vocabulary 128,000, blocks of 16 tokens; hashing and verification are inside every figure. Keys of the JSON file:

- ``a_ms``: a 32,768-token prompt that is wholly cached: hash, match, admit, release.
- ``a_floor_ms``: packing and hashing the same ids, in the same run.
- ``b_ms``: the same prompt cold: hash, match, admit, publish.
- ``b_evict_ms``: cold, where every block must first be evicted.
- ``c_ms``: one decode step of 256 running sequences at staggered offsets, publishing included; mean of 16 steps.
- ``d_ms``, ``d_hit_rate``, ``d_hit_rate_plain``: 5,000 requests over 64 system prompts of 1,024 tokens (Zipf 1), 256
  tokens of their own, 64 outputs, pool of 20,000 blocks, at most 128 running, 8,192 tokens prefilled in a step: time
  for each request, and the share of prompt tokens that hit, with and without waiting for nodes in flight.
- ``bytes_per_block``: memory of the cache's own structures for each cached block, outside the pool.
"""

import argparse
import gc
import json
import statistics
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from typing import TypeVar

import numpy as np

from prefixgate.cache.adaptive import AdaptivePolicy
from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.cache.prompt import Prompt

VOCABULARY = 128_000
BLOCK = 16
LONG = 32_768
SCOPE = CacheScope("tenant", "model@0000:float16")
HASHER = BlockHasher(b"a key for benchmarks")
T = TypeVar("T")


def make_cache(blocks: int) -> PrefixCache:
    """A cache as a worker has it by default."""
    return PrefixCache(blocks, HASHER, policy=AdaptivePolicy)


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    ids: list[int] = rng.integers(0, VOCABULARY, count).tolist()
    return ids


def time_ms(run: Callable[[T], object], setup: Callable[[], T], repeats: int) -> float:
    """Median CPU time of this thread for a run, in milliseconds; the setup is not counted."""
    figures = []
    for _ in range(repeats):
        subject = setup()
        gc.collect()
        gc.disable()
        begin = thread_time()
        run(subject)
        figures.append(thread_time() - begin)
        gc.enable()
    return statistics.median(figures) * 1e3


def compute(cache: PrefixCache, prompt: list[int]) -> BlockTable:
    """Admit a prompt and publish it, as if a step had computed it."""
    admission = cache.admit(SCOPE, prompt, max_new_tokens=1)
    assert admission is not None
    cache.run_plan(lambda plan: None)
    cache.publish(admission.table, len(prompt))
    return admission.table


def serve(cache: PrefixCache, prompt: list[int]) -> None:
    cache.release(compute(cache, prompt), len(prompt))


def measure_hit(repeats: int) -> tuple[float, float]:
    prompt = tokens(np.random.default_rng(1), LONG)
    cache = make_cache(LONG // BLOCK + 8)
    serve(cache, prompt)

    def hit(_: None) -> None:
        admission = cache.admit(SCOPE, prompt, max_new_tokens=1)
        assert admission is not None
        assert admission.cached_tokens == LONG - 1
        cache.release(admission.table, LONG - 1)

    # In turn, so that the machine's moods fall on both.
    pairs = [
        (time_ms(hit, lambda: None, 1), time_ms(lambda _: HASHER.hash_tokens(SCOPE, prompt), lambda: None, 1))
        for _ in range(repeats)
    ]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def measure_cold(repeats: int, *, evicting: bool) -> float:
    rng = np.random.default_rng(2)
    prompt, other = tokens(rng, LONG), tokens(rng, LONG)

    def setup() -> PrefixCache:
        cache = make_cache(LONG // BLOCK)
        if evicting:
            serve(cache, other)
        return cache

    return time_ms(lambda cache: compute(cache, prompt), setup, repeats)


class DecodeBatch:
    """Running sequences, of which a step touches only those that begin or fill a block.

    They stand in a wheel by the step in which their block fills. What the last steps sampled goes over to a sequence's
    token list then, which is when the cache reads it.
    """

    def __init__(self, cache: PrefixCache, rows: int) -> None:
        self._cache = cache
        self._step = 0
        self._recent: deque[list[int]] = deque(maxlen=BLOCK)
        """What the last steps sampled, by row; the oldest first."""
        self._wheel: list[dict[int, BlockTable]] = [{} for _ in range(BLOCK)]
        """By the step in which a block fills, modulo the block size: rows and their tables."""
        self._ending: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """By step: the rows that end after it, and where in the wheel they stand."""
        self.free = list(range(rows))

    def join(self, table: BlockTable, outputs: int) -> None:
        """Add a sequence whose prompt is computed; it leaves after ``outputs`` more tokens."""
        row = self.free.pop()
        spoke = (self._step - len(table.token_ids) - 1) % BLOCK
        self._wheel[spoke][row] = table
        self._ending[self._step + outputs - 1].append((row, spoke))

    def step(self, sampled: list[int]) -> int:
        """Write one token for each sequence. Returns how many ended."""
        cache, step = self._cache, self._step
        for table in self._wheel[(step - 1) % BLOCK].values():
            position = len(table.token_ids)
            cache.writable(table, position, position + 1)
        cache.run_plan(lambda plan: None)
        self._recent.append(sampled)
        for row, table in self._wheel[step % BLOCK].items():
            self._take_over(row, table, BLOCK)
            cache.publish(table, len(table.token_ids))
        ended = self._ending.pop(step, [])
        for row, spoke in ended:
            table = self._wheel[spoke].pop(row)
            self._take_over(row, table, (step - spoke) % BLOCK)
            cache.release(table, len(table.token_ids))
            self.free.append(row)
        self._step = step + 1
        return len(ended)

    def _take_over(self, row: int, table: BlockTable, written: int) -> None:
        """Bring the token list of a sequence up to date, of whose last block so many slots are written."""
        missing = written - len(table.token_ids) % BLOCK
        if missing > 0:
            table.token_ids += [sampled[row] for sampled in self._recent][-missing:]


def measure_decode(repeats: int) -> float:
    rows, steps = 256, 16
    rng = np.random.default_rng(3)
    sampled = rng.integers(0, VOCABULARY, (steps, rows)).tolist()

    def setup() -> DecodeBatch:
        cache = make_cache(20_000)
        batch = DecodeBatch(cache, rows)
        for row in range(rows):
            prompt = tokens(rng, 512 + row % BLOCK)
            admission = cache.admit(SCOPE, prompt, max_new_tokens=64)
            assert admission is not None
            cache.publish(admission.table, len(prompt))
            batch.join(admission.table, 1000)
        return batch

    def run(batch: DecodeBatch) -> None:
        for step in range(steps):
            batch.step(sampled[step])

    return time_ms(run, setup, repeats) / steps


@dataclass(slots=True)
class Mixed:
    """Requests over shared system prompts, and how the cache served them."""

    requests: int = 5_000
    systems: int = 64
    running: int = 128
    outputs: int = 64
    budget: int = 8_192
    queried: int = 0
    hit: int = 0

    def prompts(self) -> list[list[int]]:
        rng = np.random.default_rng(4)
        heads = [tokens(rng, 1024) for _ in range(self.systems)]
        weights = 1 / np.arange(1, self.systems + 1)
        chosen = rng.choice(self.systems, self.requests, p=weights / weights.sum())
        return [[*heads[head], *tokens(rng, 256)] for head in chosen.tolist()]

    def run(self, prompts: list[list[int]], *, waits: bool) -> None:
        """Serve all: admit while there is room, compute a whole prompt in a step, then decode with the others."""
        cache = make_cache(20_000)
        batch = DecodeBatch(cache, self.running)
        sampled = np.random.default_rng(5).integers(0, VOCABULARY, self.running).tolist()
        waiting: deque[tuple[list[int], Prompt | None]] = deque((prompt, None) for prompt in prompts)
        left = len(prompts)
        while left:
            admitted = self._admit(cache, waiting, len(batch.free), waits=waits)
            cache.run_plan(lambda plan: None)
            for table in admitted:
                cache.publish(table, len(table.token_ids))
            left -= batch.step(sampled)
            for table in admitted:
                batch.join(table, self.outputs - 1)  # the last sampled token is never an input

    def _admit(
        self, cache: PrefixCache, waiting: deque[tuple[list[int], Prompt | None]], rows: int, *, waits: bool
    ) -> list[BlockTable]:
        admitted: list[BlockTable] = []
        budget = self.budget
        skipped: list[tuple[list[int], Prompt | None]] = []
        while waiting and len(admitted) < rows and budget > 0:
            ids, prompt = waiting.popleft()
            prompt = prompt or cache.prompt(SCOPE, ids)
            if waits and cache.leader(prompt) is not None:
                skipped.append((ids, prompt))
                continue
            admission = cache.admit(SCOPE, ids, max_new_tokens=self.outputs, prompt=prompt)
            if admission is None:
                skipped.append((ids, prompt))
                break
            self.queried += len(ids)
            self.hit += admission.cached_tokens
            budget -= len(ids) - admission.cached_tokens
            admitted.append(admission.table)
        waiting.extendleft(reversed(skipped))
        return admitted


def measure_mixed(repeats: int, *, waits: bool) -> tuple[float, float]:
    work = Mixed()
    prompts = work.prompts()
    figures = []

    def setup() -> list[list[int]]:
        return [list(prompt) for prompt in prompts]

    def run(copies: list[list[int]]) -> None:
        work.run(copies, waits=waits)

    for _ in range(repeats):
        work.queried = work.hit = 0
        figures.append(time_ms(run, setup, 1))
    return statistics.median(figures) / work.requests, work.hit / work.queried


def measure_memory() -> float:
    """Bytes that the cache allocates for each block that it holds cached, chains of 64 blocks."""
    blocks = 8_192
    rng = np.random.default_rng(6)
    prompts = [tokens(rng, 64 * BLOCK) for _ in range(blocks // 64)]
    gc.collect()
    tracemalloc.start()
    cache = make_cache(blocks)
    for prompt in prompts:
        serve(cache, list(prompt))
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cache.stats().cached_blocks == blocks
    return used / blocks


TARGETS = {"a_ms": 2.4, "b_ms": 3.2, "b_evict_ms": 3.5, "c_ms": 0.14, "d_ms": 0.30}


def measure(repeats: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    figures["a_ms"], figures["a_floor_ms"] = measure_hit(4 * repeats)
    figures["b_ms"] = measure_cold(2 * repeats, evicting=False)
    figures["b_evict_ms"] = measure_cold(2 * repeats, evicting=True)
    figures["c_ms"] = measure_decode(2 * repeats)
    figures["d_ms"], figures["d_hit_rate"] = measure_mixed(max(1, repeats // 3), waits=True)
    _, figures["d_hit_rate_plain"] = measure_mixed(1, waits=False)
    figures["bytes_per_block"] = measure_memory()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the cache's operations.")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=9, help="more repeats, steadier medians (default 9)")
    options = parser.parse_args()
    figures = measure(options.repeats)
    for key, value in figures.items():
        target = f"   bound {TARGETS[key]:.2f}" if key in TARGETS else ""
        print(f"{key:18s} {value:10.4f}{target}")
    print(f"{'a / a_floor':18s} {figures['a_ms'] / figures['a_floor_ms']:10.4f}   bound 2.00")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
