"""What a model serves on a device: how many sequences fit, how soon the first token comes, how fast decoding is."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from benchmarks.bench_engine import TENANT, BenchEngine
from benchmarks.gpu_copies import seconds_each
from benchmarks.gpu_rig import Rig
from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.device_sampler import Awaited, Outcome
from prefixgate.worker.limits import Limits
from prefixgate.worker.model_runner import Row
from prefixgate.worker.probe import survey
from prefixgate.worker.transformers_runner import TransformersRunner

Record = Callable[[str, float], None]


_SPARE_BYTES = 10 << 30
"""Memory that is left to the steps, beside weights and pool."""


class ServingSizes(NamedTuple):
    """How long texts are and how many there are."""

    pool_bytes: int = 66 << 30
    reserve: int = 2048
    """Tokens that are kept for each sequence where all of its longest length is reserved."""
    length: int = 350
    output: int = 32
    """Of ``length``."""
    system: int = 256
    cached: int = 2048
    new: int = 64
    decoding: tuple[int, ...] = (1, 16, 64, 256)
    shared: int = 256
    own: int = 64
    decode_steps: int = 24
    batch_tokens: int = 16_384
    repeats: int = 5


class Serving:
    """A model on a device, and what is measured with it."""

    def __init__(self, rig: Rig, model: Any, sizes: ServingSizes, record: Record) -> None:
        self._rig, self._model, self._sizes, self._record = rig, model, sizes, record
        self._random = torch.Generator().manual_seed(0)
        layout = survey(model).layout
        spare = _SPARE_BYTES if rig.is_cuda else 0
        # One for all that is measured: most of a device's memory cannot be had twice.
        self._storage = rig.storage(min(sizes.pool_bytes, rig.free_bytes() - spare) // layout.block_bytes, layout)

    def tokens(self, count: int) -> list[int]:
        ids: list[int] = torch.randint(5, self._model.config.vocab_size, (count,), generator=self._random).tolist()
        return ids

    def _bench(self, running: int, *, share: bool = True, graphs: bool = True) -> BenchEngine:
        """Return an engine with an empty cache over the pool."""
        runner = self._rig.runner(self._model, self._storage, share=share, graphs=graphs)
        return BenchEngine(runner, Limits(self._sizes.batch_tokens + running, running, 4096))

    # Capacity

    def capacity(self) -> None:
        """Count the sequences that one pool serves at the same time, by how their blocks come to them."""
        sizes, layout, num_blocks = self._sizes, self._storage.layout, self._storage.num_blocks
        self._record("capacity_pool_gib", num_blocks * layout.block_bytes / 2**30)
        self._record("capacity_reserved_sequences", self._reserved())
        each, system = -(-sizes.length // layout.block_size), sizes.system // layout.block_size
        self._fill("paged", num_blocks // each, 0)
        self._fill("shared", (num_blocks - system) // (each - system), sizes.system)

    def _reserved(self) -> int:
        """Hold all blocks of the longest length for each sequence, and run those that are in."""
        sizes = self._sizes
        runner = self._rig.runner(self._model, self._storage)
        cache = PrefixCache(self._storage.num_blocks, BlockHasher(bytes(16)))
        scope = CacheScope(TENANT, "random")
        prompt_tokens = sizes.length - sizes.output
        tables: list[tuple[list[int], list[int]]] = []
        while True:
            prompt = self.tokens(prompt_tokens)
            admission = cache.admit(scope, prompt, max_new_tokens=sizes.reserve - prompt_tokens)
            if admission is None:
                break
            cache.writable(admission.table, prompt_tokens, sizes.reserve)
            tables.append((prompt, admission.table.block_ids))
        at_once = max(1, sizes.batch_tokens // prompt_tokens)
        for first in range(0, len(tables), at_once):
            runner.forward([Row(prompt, 0, table, scope, True) for prompt, table in tables[first : first + at_once]])
        for step in range(sizes.output):
            logits = runner.forward([Row([7], prompt_tokens + step, table, scope, True) for _, table in tables])
            if step == sizes.output - 1 and not bool(logits.isfinite().all()):
                raise RuntimeError("the logits are not finite")
        return len(tables)

    def _fill(self, name: str, sequences: int, shared: int) -> None:
        """Serve as many sequences as there are blocks for, all of them at once."""
        sizes = self._sizes
        bench = self._bench(sequences)
        trunk = self.tokens(shared)
        if shared:
            bench.generate([[*trunk, *self.tokens(sizes.length - sizes.output - shared)]], 1)
        for _ in range(sequences):
            bench.submit([*trunk, *self.tokens(sizes.length - sizes.output - shared)], sizes.output)
        most = 0
        while bench.engine.step():
            most = max(most, bench.engine.report().running_sequences)
        self._record(f"capacity_{name}_sequences", most)
        self._record(f"capacity_{name}_preemptions", bench.observations.preemptions)

    # First token

    def first_token(self) -> None:
        """Compare a prompt whose beginning is cached with one of the same length of which nothing is."""
        sizes = self._sizes
        bench = self._bench(8)
        trunk = self.tokens(sizes.cached)
        hits, colds = [], []
        for _ in range(2):  # the second of each finds all kernels compiled
            self._first_ms(bench, [*trunk, *self.tokens(sizes.new)])
            self._first_ms(bench, self.tokens(sizes.cached + sizes.new))
        for _ in range(sizes.repeats):
            hits.append(self._first_ms(bench, [*trunk, *self.tokens(sizes.new)]))
            colds.append(self._first_ms(bench, self.tokens(sizes.cached + sizes.new)))
        self._record("first_hit_ms", statistics.median(hits))
        self._record("first_cold_ms", statistics.median(colds))
        self._record("first_cold_over_hit", statistics.median(colds) / statistics.median(hits))

    @staticmethod
    def _first_ms(bench: BenchEngine, prompt: list[int]) -> float:
        begin = time.perf_counter()
        bench.generate([prompt], 1)
        return (time.perf_counter() - begin) * 1e3

    # Decoding

    def decoding(self) -> None:
        """Measure tokens a second, in the four ways of recorded or not and shared prefixes read once or not."""
        ways = {
            "plain": {"share": False, "graphs": False},
            "graphs": {"share": False, "graphs": True},
            "shared": {"share": True, "graphs": False},
            "served": {"share": True, "graphs": True},
        }
        for sequences in self._sizes.decoding:
            for name, way in ways.items():
                bench = self._decoding_bench(sequences, **way)
                self._record(f"decode_{sequences}_{name}_tokens_per_s", self._decode_speed(bench))
            self._rig.release()

    def _decoding_bench(self, sequences: int, **way: bool) -> BenchEngine:
        """Return an engine in which so many sequences decode, and go on."""
        sizes = self._sizes
        bench = self._bench(sequences, **way)
        trunk = self.tokens(sizes.shared)
        bench.generate([[*trunk, 5]], 1)
        for _ in range(sequences):
            bench.submit([*trunk, *self.tokens(sizes.own)], 3 * sizes.decode_steps + 8)
        before = bench.heard
        # A few steps that all of them have a token in: graphs are recorded and kernels compiled by then.
        while bench.heard < before + 6 * sequences:
            bench.engine.step()
        return bench

    def _decode_speed(self, bench: BenchEngine) -> float:
        before, begin = bench.heard, time.perf_counter()
        for _ in range(self._sizes.decode_steps):
            bench.engine.step()
        return (bench.heard - before) / (time.perf_counter() - begin)

    # Overhead

    def overhead(self) -> None:
        """Measure what a decode step takes beside the model, at 64 sequences, or the most there are in a small run."""
        sizes = self._sizes
        sequences = 64 if 64 in sizes.decoding else max(sizes.decoding)
        bench = self._decoding_bench(sequences, share=False, graphs=True)
        steps, waits = [], []
        with _waiting() as waited:
            for _ in range(sizes.decode_steps):
                waited.clear()
                begin = time.perf_counter()
                bench.engine.step()
                steps.append((time.perf_counter() - begin) * 1e3)
                waits.append(sum(waited) * 1e3)
        runner = bench.runner
        assert isinstance(runner, TransformersRunner)
        rows = self._rows_like(bench, sequences)
        model = seconds_each(self._rig, lambda: runner.forward(rows)) * 1e3
        step = statistics.median(steps)
        self._record("step_64_ms", step)
        self._record("step_64_model_ms", model)
        self._record("step_64_overhead_ms", step - model)
        self._record("step_64_host_ms", statistics.median(a - b for a, b in zip(steps, waits, strict=True)))
        bench.run()

    def _rows_like(self, bench: BenchEngine, sequences: int) -> list[Row]:
        """Make a decode step over as many slots as the engine's last one had. What these hold does not matter."""
        sizes, scope = self._sizes, CacheScope(TENANT, "random")
        start = sizes.shared + sizes.own + 6 + sizes.decode_steps
        per_row, num_blocks = start // 16 + 1, bench.cache.num_blocks
        return [
            Row([7], start, [(i * per_row + j) % num_blocks for j in range(per_row)], scope, True)
            for i in range(sequences)
        ]


@contextmanager
def _waiting() -> Iterator[list[float]]:
    """Collect how long the host waits for steps to come back."""
    waited: list[float] = []
    wait = Awaited.wait

    def timed(awaited: Awaited) -> Outcome:
        begin = time.perf_counter()
        outcome = wait(awaited)
        waited.append(time.perf_counter() - begin)
        return outcome

    Awaited.wait = timed  # type: ignore[method-assign, assignment]
    try:
        yield waited
    finally:
        Awaited.wait = wait  # type: ignore[method-assign]
