"""Replays a trace on a tree of its own: what a policy is worth, and a check on the real cache's hit counts.

Block by block, one request after the other, from cold; one id of the trace is one block. Shares with the cache only the
policy under test: no index, no pool, no reference counts. Requests larger than the pool are skipped and counted.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.traces import Trace
from prefixgate.cache.eviction import EvictionPolicy

NONE = -1


class Replay(NamedTuple):
    """What a replay found, in tokens of the prompts that were not skipped."""

    hit_tokens: int
    prompt_tokens: int
    skipped: int

    @property
    def hit_percent(self) -> float:
        return 100 * self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Simulator:
    """A pool of blocks over a tree of ids, in which leaves are evicted by a policy."""

    def __init__(
        self, unique: int, num_blocks: int, policy: Callable[[int, Callable[[int], bool]], EvictionPolicy]
    ) -> None:
        self._block_of = [NONE] * unique
        self._id_of = [NONE] * num_blocks
        self._parent = [NONE] * num_blocks
        self._children = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held = NONE  # the last hit block of the request at hand; those before it have children
        # One more than is used: the real cache needs it for the token that it always computes.
        self._policy = policy(num_blocks + 1, self._is_evictable)
        self._queue = self._policy.queue()

    def serve(self, ids: list[int]) -> int:
        """Cache a whole path. Returns how many of its leading blocks were cached."""
        block_of = self._block_of
        hits = bisect_left(ids, True, key=lambda block_id: block_of[block_id] == NONE)
        self._held = block_of[ids[hits - 1]] if hits else NONE
        missing = ids[hits:]
        if len(missing) > len(self._free):
            self._evict(len(missing) - len(self._free))
        if missing:
            self._insert(missing)
        self._held = NONE
        last = block_of[ids[-1]]
        self._policy.used(last)
        if self._is_evictable(last):
            self._queue.add(last)
        return hits

    def _insert(self, missing: list[int]) -> None:
        above = root = self._held if self._held != NONE else len(self._id_of) + 1
        taken = self._free[-len(missing) :]
        del self._free[-len(missing) :]
        for block_id, block in zip(missing, taken, strict=True):
            self._block_of[block_id], self._id_of[block] = block, block_id
            self._parent[block] = above
            if above < len(self._children):
                self._children[above] += 1
            above = block
        self._policy.published(root, taken, [block_id.to_bytes(4, "little") for block_id in missing])

    def _evict(self, count: int) -> None:
        while count:
            count -= self._evict_path(count)

    def _evict_path(self, limit: int) -> int:
        """Evict a leaf, and its ancestors while they are next. Returns how many blocks went."""
        gone: list[bytes] = []
        block = self._queue.pop()
        while block is not None:
            block_id = self._id_of[block]
            gone.append(block_id.to_bytes(4, "little"))
            self._block_of[block_id] = self._id_of[block] = NONE
            self._free.append(block)
            parent, child, block = self._parent[block], block, None
            if parent < len(self._children):
                self._children[parent] -= 1
                if self._is_evictable(parent):
                    if len(gone) < limit and self._queue.succeeds(parent, child):
                        block = parent
                    else:
                        self._queue.add(parent, child)
        assert gone, "whatever the path at hand does not hold can be evicted"
        self._policy.evicted(gone)
        return len(gone)

    def _is_evictable(self, block: int) -> bool:
        return block != self._held and self._id_of[block] != NONE and not self._children[block]


def simulate(trace: Trace, num_blocks: int, policy: Callable[[int, Callable[[int], bool]], EvictionPolicy]) -> Replay:
    """Replay a trace against a pool of ``num_blocks`` blocks."""
    simulator = Simulator(trace.unique_blocks, num_blocks, policy)
    hit_tokens = prompt_tokens = skipped = 0
    for request in trace.requests:
        if request.num_blocks > num_blocks:
            skipped += 1
            continue
        prompt_tokens += request.prompt_tokens
        if request.num_blocks:
            hits = min(simulator.serve(request.ids()), request.prompt_blocks)
            hit_tokens += min(hits * trace.block_size, request.prompt_tokens)
    return Replay(hit_tokens, prompt_tokens, skipped)
