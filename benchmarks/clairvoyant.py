"""The bound: what a leaf-first cache hits that knows the future and evicts the leaf used again last.

The whole trace is known, so blocks that all its requests use together are one segment of a tree fixed beforehand, and
the replay takes a few steps for each segment of a path. The same replay ranked by the past is LRU, by other means than
the cache's and the simulator's.
"""

from bisect import bisect_right
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import pairwise

from benchmarks.simulator import Replay
from benchmarks.traces import Trace

NONE = -1
NEVER = 1 << 60
Rank = Callable[[int, int], int]
"""Rank of a segment after the request with the given number; lowest goes first."""


class SegmentTree:
    """The blocks of a trace as segments, and each request's path through them."""

    def __init__(self, trace: Trace, largest: int) -> None:
        edges = {0, trace.unique_blocks}
        for request in trace.requests:
            for first, count in request.runs:
                edges.update((first, first + count))
        starts = sorted(edges)
        self.lengths = [after - before for before, after in pairwise(starts)]
        self.parents = [NONE] * len(self.lengths)
        self.paths: list[list[int]] = []
        self.uses: list[list[int]] = [[] for _ in self.lengths]
        """Numbers of the requests of at most ``largest`` blocks that use each segment."""
        number_of = {start: number for number, start in enumerate(starts)}
        for number, request in enumerate(trace.requests):
            path = [
                segment
                for first, count in request.runs
                for segment in range(number_of[first], number_of[first + count])
            ]
            for above, segment in pairwise([NONE, *path]):
                self.parents[segment] = above
                if request.num_blocks <= largest:
                    self.uses[segment].append(number)
            self.paths.append(path)


class SegmentPool:
    """A pool that keeps leading parts of segments."""

    def __init__(self, tree: SegmentTree, num_blocks: int, rank: Rank) -> None:
        self._tree = tree
        self._free = num_blocks
        self._rank = rank
        self._cached = [0] * len(tree.lengths)
        self._children = [0] * len(tree.lengths)
        self._leaves: list[tuple[int, int]] = []  # stale entries among them

    def serve(self, number: int) -> int:
        """Cache a request's whole path. Returns how many of its leading blocks were cached."""
        path, lengths = self._tree.paths[number], self._tree.lengths
        hits = sum(self._cached[segment] for segment in path)
        missing = sum(lengths[segment] for segment in path) - hits
        self._evict(missing - self._free, number - 1, set(path))
        self._free -= missing
        for above, segment in pairwise([NONE, *path]):
            if not self._cached[segment] and above != NONE:
                self._children[above] += 1
            self._cached[segment] = lengths[segment]
        for segment in path:
            if not self._children[segment]:
                heappush(self._leaves, (self._rank(segment, number), segment))
        return hits

    def _evict(self, count: int, number: int, held: set[int]) -> None:
        while count > 0:
            rank, segment = heappop(self._leaves)
            stale = not self._cached[segment] or self._children[segment] or rank != self._rank(segment, number)
            if stale or segment in held:
                continue
            gone = min(count, self._cached[segment])
            count -= gone
            self._free += gone
            self._cached[segment] -= gone
            parent = self._tree.parents[segment]
            if self._cached[segment]:
                heappush(self._leaves, (rank, segment))
            elif parent != NONE:
                self._children[parent] -= 1
                if not self._children[parent]:
                    heappush(self._leaves, (self._rank(parent, number), parent))


def clairvoyant(trace: Trace, num_blocks: int) -> Replay:
    """Evict the leaf whose next use is farthest."""
    tree = SegmentTree(trace, num_blocks)

    def rank(segment: int, number: int) -> int:
        uses = tree.uses[segment]
        after = bisect_right(uses, number)
        return -uses[after] if after < len(uses) else -NEVER

    return _replay(trace, tree, SegmentPool(tree, num_blocks, rank), num_blocks)


def least_recent(trace: Trace, num_blocks: int) -> Replay:
    """Evict the leaf whose last use is longest ago."""
    tree = SegmentTree(trace, num_blocks)

    def rank(segment: int, number: int) -> int:
        uses = tree.uses[segment]
        return uses[bisect_right(uses, number) - 1]

    return _replay(trace, tree, SegmentPool(tree, num_blocks, rank), num_blocks)


def _replay(trace: Trace, tree: SegmentTree, pool: SegmentPool, num_blocks: int) -> Replay:
    hit_tokens = prompt_tokens = skipped = 0
    for number, request in enumerate(trace.requests):
        if request.num_blocks > num_blocks:
            skipped += 1
            continue
        prompt_tokens += request.prompt_tokens
        hits = min(pool.serve(number), request.prompt_blocks)
        hit_tokens += min(hits * trace.block_size, request.prompt_tokens)
    return Replay(hit_tokens, prompt_tokens, skipped)
