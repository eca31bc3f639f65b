"""Replays a trace through the real cache, one call after the other."""

from collections.abc import Callable

from benchmarks.simulator import Replay
from benchmarks.traces import Trace
from prefixgate.cache.eviction import EvictionPolicy
from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache

SCOPE = CacheScope("tenant", "model@0000:float16")


def replay(trace: Trace, num_blocks: int, policy: Callable[[int, Callable[[int], bool]], EvictionPolicy]) -> Replay:
    """Serve every request of a trace from a pool that keeps ``num_blocks`` blocks.

    One id of the trace is one token and one block. Each prompt ends in a token that no other has, since the last token
    is always computed; its block is the one that the pool has in addition, and it is never published.
    """
    hasher = BlockHasher(b"a key for benchmarks", block_size=1)
    cache = PrefixCache(num_blocks + 1, hasher, policy=policy)
    last = trace.unique_blocks
    hit_tokens = prompt_tokens = skipped = 0
    for request in trace.requests:
        if request.num_blocks > num_blocks:
            skipped += 1
            continue
        prompt_tokens += request.prompt_tokens
        if not request.num_blocks:
            continue
        admission = cache.admit(SCOPE, [*request.ids(), last], max_new_tokens=1)
        assert admission is not None, "nothing else is running"
        cache.run_plan(lambda plan: None)
        cache.release(admission.table, request.num_blocks)
        hits = min(admission.block_hit_tokens, request.prompt_blocks)
        hit_tokens += min(hits * trace.block_size, request.prompt_tokens)
    return Replay(hit_tokens, prompt_tokens, skipped)
