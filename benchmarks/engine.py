"""How fast the engine is beside the library that its models come from: ratios, in one run, on the same weights.

    python -m benchmarks.engine [--json FILE] [--quick] [--only CASE ...] [--repeats N] [--threads N] [--dtype NAME]
        [--gguf FILE]

The embedded model; contenders take turns, and each figure is the median of the ratios of paired runs. ``--quick`` does
the same with shorter texts and one pair each, in under a minute; its ratios are smaller than those of the full run.
Cases, and their keys in the JSON file (``_ms`` are milliseconds, all others ratios; more is better unless said):

- ``shared8``, ``shared32``: requests with a common prefix of 1,024 tokens, 64 of their own and 32 of output, on an
  empty cache. Output tokens a second against batched ``generate`` (``shared8_over_generate``) and the library's
  continuous batching (``shared8_over_generate_batch``).
- ``distinct8``: 8 wholly different prompts of 512 tokens, 64 of output: ``distinct8_over_generate``.
- ``single``: one prompt of 64 tokens, 64 of output: ``single_over_generate``.
- ``first``: first token through the worker's service, 1,024 cached tokens and 64 new: ``first_hit_over_bare`` is its
  time over one bare forward pass of those 64 tokens with that context (less is better), ``first_cold_over_hit`` the
  time without the cache over that with it; ``first_hit_ms``, ``first_bare_ms``, ``first_cold_ms``.
- ``shared_step``: a decode step of 16 users over one prefix of 2,048 tokens, over the same step with 1 token of context
  each (``shared_step_over_short``, less is better), and the plain path's time over it (``shared_step_plain_over``).
- ``own_step``: a decode step of 32 sequences with 512 tokens of their own each, over the same step with 1 token of
  context each (``own_step_over_short``, less is better), and the time with torch's attention over it
  (``own_step_torch_over``).
- ``overhead``: ``overhead_ms``, what a decode step of 64 sequences on the witness model takes outside of the model.

- ``llama``: llama.cpp on the model's GGUF file, where ``llama-cpp-python`` (extra ``bench``) is installed; without it
  the case says so and records nothing. Its weights are quantized, ours are not. ``llama_first_hit_over_ours`` as in
  ``first``; ``llama_shared8_over_ours``, total time of the requests of ``shared8``, which it serves one after another;
  ``llama_first_hit_ms``, ``llama_first_cold_ms``.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# As the worker's process has it, read once when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.bench_engine import TENANT, BenchEngine
from benchmarks.hosted_worker import serve
from benchmarks.llama_model import NOT_INSTALLED, LlamaModel
from benchmarks.stock_model import StockModel
from prefixgate.cache.hashing import CacheScope
from prefixgate.config.cache_settings import CacheSettings
from prefixgate.config.settings import WorkerSettings
from prefixgate.worker.attention import AttentionBackend
from prefixgate.worker.conversion import cache_folder
from prefixgate.worker.cpu_attention import cpu_attention
from prefixgate.worker.loader import load_runner
from prefixgate.worker.model_runner import ModelRunner, Row
from prefixgate.worker.pretrained import load_pretrained
from prefixgate.worker.sdpa_attention import SdpaBackend
from prefixgate.worker.transformers_runner import TransformersRunner

NUM_BLOCKS = 1400
SCOPE = CacheScope(TENANT, "smollm2")
BLOCK = 16


class Sizes(NamedTuple):
    """How long the texts are."""

    prefix: int = 1024
    own: int = 64
    output: int = 32
    distinct: int = 512
    distinct_output: int = 64
    single_output: int = 64
    step_prefix: int = 2048


QUICK = Sizes(prefix=128, own=32, output=4, distinct=96, distinct_output=4, single_output=8, step_prefix=1024)


class Bench:
    """The loaded models, the sizes, and what came out."""

    def __init__(self, sizes: Sizes, repeats: int, threads: int, dtype: str, gguf: Path | None) -> None:
        self.sizes, self.repeats, self.threads, self.gguf = sizes, repeats, threads, gguf
        settings = WorkerSettings(model="smollm2", device="cpu", dtype=dtype, threads=threads)
        self.runner = load_pretrained(settings, lambda layout, room: NUM_BLOCKS, print)
        self.stock = StockModel(self.runner.spec.kv_layout.dtype)
        self.results: dict[str, float] = {}
        self._random = torch.Generator().manual_seed(0)

    def tokens(self, count: int) -> list[int]:
        ids: list[int] = torch.randint(100, 40_000, (count,), generator=self._random).tolist()
        return ids

    def record(self, key: str, value: float) -> None:
        self.results[key] = round(value, 3)
        print(f"  {key:32} {value:9.2f}", flush=True)

    def texts(self, prompts: Sequence[list[int]], output: int) -> Callable[[], list[list[int]]]:
        """Return a run of prompts on an engine with an empty cache."""
        return lambda: BenchEngine(self.runner).generate(prompts, output)


def timed(run: Callable[[], object]) -> float:
    """Return how many milliseconds a run takes."""
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def ratio(above: Callable[[], object], below: Callable[[], object], repeats: int) -> float:
    """Return the median of time over time, of pairs run in turn."""
    return statistics.median(timed(above) / timed(below) for _ in range(repeats))


def shared(bench: Bench, users: int) -> None:
    sizes = bench.sizes
    prefix = bench.tokens(sizes.prefix)
    prompts = [prefix + bench.tokens(sizes.own) for _ in range(users)]
    ours = bench.texts(prompts, sizes.output)
    ours()
    for name, contender in (("generate", bench.stock.generate), ("generate_batch", bench.stock.generate_batch)):
        bench.record(
            f"shared{users}_over_{name}",
            # A contender takes up to minutes; beside that the noise of one pair is small.
            ratio(lambda contender=contender: contender(prompts, sizes.output), ours, 1),  # type: ignore[misc]
        )


def distinct(bench: Bench) -> None:
    prompts = [bench.tokens(bench.sizes.distinct) for _ in range(8)]
    output = bench.sizes.distinct_output
    ours = bench.texts(prompts, output)
    bench.record(
        "distinct8_over_generate", ratio(lambda: bench.stock.generate(prompts, output), ours, min(bench.repeats, 2))
    )


def single(bench: Bench) -> None:
    prompts, output = [bench.tokens(64)], bench.sizes.single_output
    ours = bench.texts(prompts, output)
    ours()
    bench.stock.generate(prompts, output)
    bench.record("single_over_generate", ratio(lambda: bench.stock.generate(prompts, output), ours, bench.repeats))


def first(bench: Bench) -> None:
    prefix = bench.tokens(bench.sizes.prefix)
    questions = [bench.tokens(bench.sizes.own) for _ in range(bench.repeats + 1)]
    bare = bench.stock.bare_over(prefix, questions[0])
    bare()
    hits: list[float] = []
    bares: list[float] = []
    colds: list[float] = []

    async def run() -> None:
        async with serve(BenchEngine(bench.runner)) as client:
            await client.first_token_ms(prefix + questions[0])
            for question in questions[1:]:
                hits.append(await client.first_token_ms(prefix + question))
                bares.append(timed(bare))
            fresh = [bench.tokens(len(prefix) + bench.sizes.own) for _ in range(min(bench.repeats, 3))]
            colds.extend([await client.first_token_ms(prompt) for prompt in fresh])

    asyncio.run(run())
    bench.record("first_hit_over_bare", statistics.median(a / b for a, b in zip(hits, bares, strict=True)))
    bench.record("first_cold_over_hit", statistics.median(colds) / statistics.median(hits))
    for name, times in (("hit", hits), ("bare", bares), ("cold", colds)):
        bench.record(f"first_{name}_ms", statistics.median(times))


def decode_rows(sequences: int, context: int, prefix: int = 0) -> list[Row]:
    """Make a decode step: so many sequences with so much context, of which they share a prefix."""
    free = iter(range(NUM_BLOCKS))
    trunk = [next(free) for _ in range(prefix // BLOCK)]
    own = -(-(context + 1) // BLOCK) - len(trunk)
    return [Row([7 + i], context, trunk + [next(free) for _ in range(own)], SCOPE, True) for i in range(sequences)]


def step(runner: ModelRunner, rows: Sequence[Row]) -> Callable[[], object]:
    return lambda: runner.forward(rows)


def other_path(bench: Bench, backend: AttentionBackend, *, share: bool) -> Callable[[Sequence[Row]], float]:
    """Return what times a step on the same weights and pool by another way to attend."""
    runner = bench.runner

    def run(rows: Sequence[Row]) -> float:
        # Which function the layers call is a state of the model: each runner takes it over when it is made.
        other = TransformersRunner(runner.model, runner.spec, runner.storage, backend, share_prefixes=share)
        try:
            other.forward(rows)
            return timed(step(other, rows))
        finally:
            bench.runner = TransformersRunner(runner.model, runner.spec, runner.storage, native(bench))

    return run


def native(bench: Bench) -> AttentionBackend:
    return cpu_attention(bench.runner.spec.kv_layout.dtype, cache_folder(), lambda line: None)


def shared_step(bench: Bench) -> None:
    prefix = bench.sizes.step_prefix
    bench.runner.storage.data.normal_()
    long, short = decode_rows(16, prefix + 1, prefix), decode_rows(16, 1)
    for rows in (long, short):
        bench.runner.forward(rows)
    bench.record("shared_step_over_short", ratio(step(bench.runner, long), step(bench.runner, short), bench.repeats))
    plain = other_path(bench, native(bench), share=False)
    ratios = [plain(long) / timed(step(bench.runner, long)) for _ in range(min(bench.repeats, 5))]
    bench.record("shared_step_plain_over", statistics.median(ratios))


def own_step(bench: Bench) -> None:
    bench.runner.storage.data.normal_()
    long, short = decode_rows(32, 512), decode_rows(32, 1)
    for rows in (long, short):
        bench.runner.forward(rows)
    bench.record("own_step_over_short", ratio(step(bench.runner, long), step(bench.runner, short), bench.repeats))
    torch_alone = other_path(bench, SdpaBackend(), share=False)
    ratios = [torch_alone(long) / timed(step(bench.runner, long)) for _ in range(min(bench.repeats, 5))]
    bench.record("own_step_torch_over", statistics.median(ratios))


class TimedRunner:
    """A runner that adds up the time of its forward passes."""

    def __init__(self, runner: ModelRunner) -> None:
        self.spec, self.storage, self._runner = runner.spec, runner.storage, runner
        self.milliseconds = 0.0

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        begin = time.perf_counter()
        logits = self._runner.forward(rows)
        self.milliseconds += (time.perf_counter() - begin) * 1e3
        return logits


def overhead(bench: Bench) -> None:
    witness = load_runner(WorkerSettings(model="witness"), CacheSettings(blocks=1024), print)
    runner = TimedRunner(witness)
    engine = BenchEngine(runner)
    for i in range(64):
        engine.submit([65 + i] * 40, 200)
    for _ in range(20):
        engine.engine.step()
    figures = []
    for _ in range(100):
        runner.milliseconds = 0.0
        whole = timed(engine.engine.step)
        figures.append(whole - runner.milliseconds)
    bench.record("overhead_ms", statistics.median(figures))


async def first_hits(bench: Bench, prefix: list[int], questions: Sequence[list[int]]) -> list[float]:
    """Return the times of first tokens through the service, of all questions but the one that fills the cache."""
    async with serve(BenchEngine(bench.runner)) as client:
        return [await client.first_token_ms(prefix + question) for question in questions][1:]


def llama(bench: Bench) -> None:
    try:
        contender = LlamaModel(bench.gguf, bench.threads)
    except ImportError:
        print(NOT_INSTALLED)
        return
    sizes = bench.sizes
    print(f"  llama.cpp: {contender.quantization}; ours: {bench.runner.spec.kv_layout.dtype}")
    prefix = bench.tokens(sizes.prefix)
    questions = [bench.tokens(sizes.own) for _ in range(bench.repeats + 1)]
    cold = contender.first_token_ms(prefix + questions[0])
    theirs = [contender.first_token_ms(prefix + question) for question in questions[1:]]
    ours = asyncio.run(first_hits(bench, prefix, questions))
    bench.record("llama_first_hit_over_ours", statistics.median(a / b for a, b in zip(theirs, ours, strict=True)))
    bench.record("llama_first_hit_ms", statistics.median(theirs))
    bench.record("llama_first_cold_ms", cold)
    prompts = [prefix + bench.tokens(sizes.own) for _ in range(8)]
    serve_ours = bench.texts(prompts, sizes.output)

    def serve_theirs() -> None:
        contender.forget()
        for prompt in prompts:
            contender.generate(prompt, sizes.output)

    bench.record("llama_shared8_over_ours", ratio(serve_theirs, serve_ours, min(bench.repeats, 2)))


CASES: Mapping[str, Callable[[Bench], None]] = {
    "overhead": overhead,
    "single": single,
    "first": first,
    "shared_step": shared_step,
    "own_step": own_step,
    "distinct8": distinct,
    "llama": llama,
    "shared8": lambda bench: shared(bench, 8),
    "shared32": lambda bench: shared(bench, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the engine beside the library that its models come from.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="shorter texts, one pair each, no shared32")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="of " + ", ".join(CASES))
    parser.add_argument("--repeats", type=int, default=9, help="pairs, where they are short (default 9)")
    parser.add_argument("--threads", type=int, default=2, help="threads of the arithmetic (default 2)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="for llama.cpp; the default is fetched")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    sizes, repeats = (QUICK, 1) if arguments.quick else (Sizes(), arguments.repeats)
    bench = Bench(sizes, repeats, arguments.threads, arguments.dtype, arguments.gguf)
    names = arguments.only or [name for name in CASES if not (arguments.quick and name == "shared32")]
    for name in names:
        print(name, flush=True)
        CASES[name](bench)
    if arguments.json:
        arguments.json.write_text(json.dumps(bench.results, indent=2) + "\n")


if __name__ == "__main__":
    main()
