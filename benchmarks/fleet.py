"""Simulated workers behind a router: each has its own pool and computes one prompt after the other.

The load model: one prefill server for each worker, first come first served, for the tokens that its pool does not
hold; then a decode at a constant pace, which waits for nobody. A prompt is matched when its turn comes, and by then
everything before it is in the pool. What a pool gained and lost is told when the prompt is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol

from benchmarks.simulator import Simulator
from benchmarks.traces import Trace, TraceRequest
from prefixgate.cache.hashing import BlockHash
from prefixgate.cache.lru import LRUPolicy

TOKENS_PER_SECOND = 8000.0
DECODE_SECONDS = 0.025


class Arrival(NamedTuple):
    """A call as the router sees it."""

    at: float
    """Seconds since the start."""
    request: TraceRequest
    names: Sequence[BlockHash]
    """Of the prompt's blocks."""


class Contender(Protocol):
    """Chooses workers, and hears of all that routers can hear of."""

    def choose(self, arrival: Arrival) -> int:
        """Choose a worker, by its number."""

    def computed(self, at: float, worker: int, removed: list[BlockHash], stored: list[BlockHash]) -> None:
        """The worker has computed the oldest prompt that was sent to it, and its pool changed so."""

    def ended(self, worker: int) -> None:
        """A call of the worker's ended."""


class Outcome(NamedTuple):
    """What came of a trace."""

    hit_percent: float
    """Of the prompt tokens."""
    imbalance: float
    """Prompt tokens of the worker that got most, over the mean."""
    first_token_seconds: list[float]
    """From arrival to the end of prefill, of each call."""


class _Pool(LRUPolicy):
    """LRU that notes what came and went."""

    def __init__(self, names: Sequence[BlockHash], num_blocks: int, is_evictable: Callable[[int], bool]) -> None:
        super().__init__(num_blocks, is_evictable)
        self._names = names
        self.stored: list[BlockHash] = []
        self.removed: list[BlockHash] = []

    def published(self, parent: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        self.stored += map(self._name, hashes)

    def evicted(self, hashes: Sequence[bytes]) -> None:
        self.removed += map(self._name, hashes)

    def take(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Tell what went and what came since the last time."""
        changes = self.removed, self.stored
        self.removed, self.stored = [], []
        return changes

    def _name(self, block_hash: bytes) -> BlockHash:
        # The trace's own object: news wait for their time, and there are millions of blocks in them.
        return self._names[int.from_bytes(block_hash, "little")]


class _Later(NamedTuple):
    at: float
    number: int
    """Of two things at the same time, which was known of first."""
    act: Callable[[], object]


class _Worker:
    def __init__(self, names: Sequence[BlockHash], num_blocks: int) -> None:
        self._names = names
        self.simulator = Simulator(len(names), num_blocks, self._make_pool)
        self.prompt_tokens = 0
        self.free_at = 0.0

    def _make_pool(self, num_blocks: int, is_evictable: Callable[[int], bool]) -> LRUPolicy:
        self.pool = _Pool(self._names, num_blocks, is_evictable)
        return self.pool


def _arrivals(trace: Trace, seconds: float, names: Sequence[BlockHash]) -> Iterator[Arrival]:
    """List a trace's calls, spread over so many seconds as they were over the trace's own."""
    begin, end = trace.requests[0].arrival_ms, trace.requests[-1].arrival_ms
    scale = seconds / max(end - begin, 1.0)
    for request in trace.requests:
        ids = request.ids()[: request.prompt_blocks]
        yield Arrival((request.arrival_ms - begin) * scale, request, [names[block] for block in ids])


def run(trace: Trace, seconds: float, num_workers: int, num_blocks: int, contender: Contender) -> Outcome:
    """Send a trace through a contender to workers of ``num_blocks`` each, into which every request must fit."""
    names = [BlockHash(block.to_bytes(4, "little")) for block in range(trace.unique_blocks)]
    workers = [_Worker(names, num_blocks) for _ in range(num_workers)]
    later: list[_Later] = []
    numbers = count()
    hit_tokens = 0
    waits = []
    for arrival in _arrivals(trace, seconds, names):
        request = arrival.request
        while later and later[0].at <= arrival.at:
            heappop(later).act()
        number = contender.choose(arrival)
        worker = workers[number]
        # At its turn the pool is as all those before it leave it, so that can be worked out now.
        hits = min(worker.simulator.serve(request.ids()), request.prompt_blocks)
        hit = min(hits * trace.block_size, request.prompt_tokens)
        worker.free_at = max(arrival.at, worker.free_at) + (request.prompt_tokens - hit) / TOKENS_PER_SECOND
        worker.prompt_tokens += request.prompt_tokens
        hit_tokens += hit
        waits.append(worker.free_at - arrival.at)
        computed = partial(contender.computed, worker.free_at, number, *worker.pool.take())
        heappush(later, _Later(worker.free_at, next(numbers), computed))
        ends_at = worker.free_at + request.output_tokens * DECODE_SECONDS
        heappush(later, _Later(ends_at, next(numbers), partial(contender.ended, number)))
    tokens = [worker.prompt_tokens for worker in workers]
    return Outcome(100 * hit_tokens / sum(tokens), max(tokens) * num_workers / sum(tokens), waits)
