"""What a routing decision and the index behind it cost.

    python -m benchmarks.routing_cost [--json FILE] [--workers 8] [--blocks 100000] [--tokens 32768]

The workers' pools are full of prompts of ``--tokens`` tokens, each prompt at one worker. The JSON has the keys
``hash_us`` (hashing one prompt), ``choose_held_us`` and ``choose_unseen_us`` (choosing a worker for a prompt that one
worker holds, and for one that none holds), ``event_block_us`` (taking a block that a worker stored or removed),
``forget_ms`` (dropping a worker) and ``block_bytes`` (the index's memory for each block). Times are medians.
"""

import argparse
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

from prefixgate.cache.hashing import BLOCK_SIZE, BlockHash, BlockHasher, CacheScope
from prefixgate.config.routing_settings import RoutingSettings
from prefixgate.gateway.candidate import Candidate
from prefixgate.gateway.pending_prompts import PendingPrompts
from prefixgate.gateway.router import PrefixRouter
from prefixgate.gateway.routing_index import Removed, Stored

REPEATS = 200
SCOPE = CacheScope("tenant", "model@0000:float16")


def times(act: Callable[[], object]) -> float:
    """Return the median time of an act, in microseconds."""
    found = []
    for _ in range(REPEATS):
        begin = perf_counter()
        act()
        found.append(perf_counter() - begin)
    return median(found) * 1e6


def measure(num_workers: int, blocks: int, tokens: int) -> dict[str, float]:
    """Fill an index and ask it."""
    choice = random.Random(1)
    hasher = BlockHasher(b"a key for benchmarks")
    router = PrefixRouter(hasher, RoutingSettings())
    names = [f"10.0.0.{number}:8060" for number in range(num_workers)]
    prompts = [[choice.randrange(1 << 17) for _ in range(tokens)] for _ in range(4)]
    hashes = [hasher.hash_tokens(SCOPE, prompt) for prompt in prompts]
    tracemalloc.start()
    for number, name in enumerate(names):
        # As they come off the wire: bytes of their own. Half of the workers hold the first prompt, half the second.
        held = {BlockHash(choice.randbytes(16)) for _ in range(blocks - tokens // BLOCK_SIZE)}
        held.update(BlockHash(bytes(bytearray(one))) for one in hashes[number % 2])
        router.index.snapshot(name, "life", 0, {SCOPE.tenant: held})
        del held
    block_bytes = tracemalloc.get_traced_memory()[0] / (num_workers * blocks)
    tracemalloc.stop()
    candidates = [Candidate(name, 0, PendingPrompts()) for name in names]

    def choose(number: int) -> Callable[[], object]:
        return lambda: router.choose_by_hashes(SCOPE.tenant, hashes[number], tokens, candidates, keeps_blocks=False)

    step = 100
    numbers = iter(range(1, 10**9))
    fresh = [BlockHash(choice.randbytes(16)) for _ in range(step)]

    def events() -> None:
        router.index.apply(names[0], "life", next(numbers), Stored(SCOPE.tenant, fresh))
        router.index.apply(names[0], "life", next(numbers), Removed(SCOPE.tenant, fresh))

    figures = {
        "hash_us": times(lambda: hasher.hash_tokens(SCOPE, prompts[0])),
        "choose_held_us": times(choose(0)),
        "choose_unseen_us": times(choose(3)),
        "event_block_us": times(events) / (2 * step),
    }
    begin = perf_counter()
    router.forget(names[-1])
    return {**figures, "forget_ms": (perf_counter() - begin) * 1e3, "block_bytes": block_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_cost", description="Measure routing's cost.")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks that each worker holds")
    parser.add_argument("--tokens", type=int, default=32_768, help="length of a prompt")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    arguments = parser.parse_args()
    figures = measure(arguments.workers, arguments.blocks, arguments.tokens)
    print("| figure | |\n|---|---|")
    for name, value in figures.items():
        print(f"| {name} | {value:.1f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
