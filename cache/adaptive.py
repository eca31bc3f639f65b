"""Evicts what is worth least to keep, by what the pool has seen of the time until content is used again.

LRU is right where the pool retains content for longer than its users stay away. Where it does not, everything goes
just before it would be used, and almost any other order is better: then some content must be kept past its turn at
the expense of the rest. This policy keeps LRU's order unless what it has seen tells it otherwise, and then says which:
see ``intervals`` for the worth of a block. It never knows who waits, only how long, and how long it waited before.

A use is noted once for each *run* of blocks with one history (see ``runs``), not for each block. Intervals that end
after eviction are seen too, since evicted runs are remembered (see ``ghosts``).
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush

from prefixgate.cache.ghosts import Ghosts
from prefixgate.cache.intervals import NUM_PACES, ReuseIntervals, bin_of
from prefixgate.cache.runs import NO_BLOCK, Run, num_common
from prefixgate.cache.shadow import ShadowLRU

GHOSTS_PER_BLOCK = 4
"""Evicted blocks remembered for each block of the pool. With one, the intervals that matter in a pool that thrashes
are longer than what is remembered; more than eight change nothing."""

MAY_LOSE = 0.002
"""Share of all blocks asked for that may be missed and would not have been by LRU, before LRU's order is followed until
the share has sunk."""

FADE = 0.5 ** (1 / 5000)
"""What is weighed against LRU counts half after 5,000 uses."""

CLEARLY_LESS = 0.9
"""Content goes before what LRU would evict only if it is worth less than this share of that: counts are noisy, and
where worth hardly differs LRU's order is the safer one."""

_TIE = 1e-12
"""Worth of a tick of age: where worth is equal, the older goes first."""


class AdaptivePolicy:
    """Knows the runs: which blocks each has, when it was used, and which were evicted lately."""

    name = "adaptive"

    def __init__(self, num_blocks: int, is_evictable: Callable[[int], bool]) -> None:
        self.is_evictable = is_evictable
        self.intervals = ReuseIntervals()
        self.clock = 0
        """Ticks with each use of a path."""
        self._num_blocks = num_blocks
        self._run_of: list[Run | None] = [None] * num_blocks
        self._num_runs = 0
        self._ghosts = Ghosts(GHOSTS_PER_BLOCK * num_blocks)
        self._losing: Run | None = None  # the run that blocks are being evicted from
        self._num_cached = 0
        self._shadow = ShadowLRU()
        self._lost = 0.0
        self._asked = 0.0
        self.cautious = False
        """Whether LRU's order is followed for now, since departing from it has cost more hits than it brought."""

    def queue(self) -> "AdaptiveQueue":
        return AdaptiveQueue(self)

    def worth(self, run: Run) -> float:
        """Uses per tick that keeping the run on would bring."""
        return self.intervals.worth[run.pace][bin_of(self.clock + 1 - run.used_at)]

    def run_of(self, block: int) -> Run:
        run = self._run_of[block]
        assert run is not None, f"block {block} was not published"
        return run

    # What happens to blocks

    def published(self, parent: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """A path of new nodes below ``parent``, which is a root where it is no block's number."""
        self.evicted(())
        above = self._run_ending_at(parent) if parent < self._num_blocks else None
        done = 0
        if above is None:
            parent = NO_BLOCK
        elif above.num_evicted:
            done = self._restore(above, blocks, hashes)
        elif above.growing:
            self._grow(above, blocks)
            above.hashes += hashes
            return
        else:
            above.growing = False
        while done < len(blocks):
            parent = blocks[done - 1] if done else parent
            run = self._ghosts.find(hashes[done])
            if run is None or run.blocks:
                self._grow(self._new_run(parent, hashes[done:]), blocks[done:])
                return
            run.parent = parent
            done += self._restore(run, blocks[done:], hashes[done:])

    def tail_kept(self, parent: int, block: int) -> None:
        """A node without a hash, which is no parent."""
        self.evicted(())
        above = self._run_ending_at(parent) if parent < self._num_blocks else None
        if above is not None and above.num_evicted:
            self._set_apart(above)
        run = above if above is not None and above.growing else self._new_run(parent if above else NO_BLOCK, ())
        self._grow(run, (block,))
        run.hashes.append(None)

    def used(self, block: int) -> None:
        """A path that ends at this block was used just now, and with it every block above."""
        self.evicted(())
        run = self._run_ending_at(block)
        if run.num_evicted:
            self._set_apart(run)
        self.clock += 1
        intervals, path, missed = self.intervals, [], 0
        while True:
            path.append((run.used_at, len(run.blocks)))
            missed += run.missed
            if run.used_at:
                run.pace = intervals.end(run.pace, self.clock - run.used_at)
            intervals.begin(run.pace)
            run.used_at, run.missed, run.growing = self.clock, 0, False
            if run.parent == NO_BLOCK:
                break
            run = self.run_of(run.parent)
        intervals.tick()
        self._judge(path, missed)

    def discarded(self, block: int) -> None:
        """A node without children left the index by another way than eviction: it is not remembered."""
        self.evicted(())
        run = self.run_of(block)
        if run.remembered_as is not None:
            self._ghosts.forget(run)
        run.blocks.pop()
        run.hashes.pop()
        run.missed = min(run.missed, len(run.blocks))
        self._run_of[block] = None
        self._num_cached -= 1
        self._shadow.drop(run.used_at)

    def take(self, run: Run) -> int:
        """Evict the last cached block of a run."""
        if run is not self._losing:
            self.evicted(())
            self._losing = run
            if run.remembered_as is not None:
                self._ghosts.remove(run)
        block = run.blocks.pop()
        if run.hashes[-1] is None:
            run.hashes.pop()
        self._run_of[block] = None
        self._num_cached -= 1
        return block

    def evicted(self, hashes: Sequence[bytes]) -> None:
        """Remember what was taken since the last call, as the runs know it."""
        run, self._losing = self._losing, None
        if run is not None and run.num_evicted:
            self._ghosts.add(run)

    def losing(self) -> Run | None:
        return self._losing

    def _judge(self, path: list[tuple[int, int]], missed: int) -> None:
        """Weigh a use's hits against those that LRU would have had."""
        blocks = sum(count for _, count in path)
        lru_hits = self._shadow.use(self.clock, path, self._num_cached)
        self._lost = FADE * self._lost + lru_hits - (blocks - missed)
        self._asked = FADE * self._asked + blocks
        self.cautious = self._lost > MAY_LOSE * self._asked

    # How runs begin, grow and part

    def _new_run(self, parent: int, hashes: Iterable[bytes | None]) -> Run:
        self._num_runs += 1
        return Run(self._num_runs, parent, [], list(hashes))

    def _grow(self, run: Run, blocks: Sequence[int]) -> None:
        run.blocks += blocks
        run.missed += len(blocks)
        self._num_cached += len(blocks)
        run_of = self._run_of
        for block in blocks:
            run_of[block] = run

    def _run_ending_at(self, block: int) -> Run:
        """The run whose last cached block this is; made by parting one where a path ends or forks inside it."""
        run = self.run_of(block)
        if run.blocks[-1] == block:
            return run
        end = run.blocks.index(block) + 1
        # The lower part stays the same object: it may stand in a queue or in the directory. The cost is that of a few
        # instructions for each block of the path that ends here.
        upper = self._new_run(run.parent, run.hashes[:end])
        upper.used_at, upper.pace, upper.growing = run.used_at, run.pace, False
        upper.blocks = run.blocks[:end]
        for own in upper.blocks:
            self._run_of[own] = upper
        # What was computed since the last use is at the end.
        upper.missed = max(0, run.missed - (len(run.blocks) - end))
        run.missed -= upper.missed
        del run.blocks[:end]
        del run.hashes[:end]
        run.parent = block
        return upper

    def _restore(self, run: Run, blocks: Sequence[int], hashes: Sequence[bytes]) -> int:
        """Continue a run with those of its evicted nodes that were computed again. Returns how many those are."""
        common = num_common(run.hashes[len(run.blocks) :], hashes)
        if common:
            self._ghosts.remove(run)
            self._grow(run, blocks[:common])
            if run.num_evicted:
                self._ghosts.add(run)
        if run.num_evicted:
            self._set_apart(run)
        return common

    def _set_apart(self, run: Run) -> None:
        """Part a run from its evicted nodes, which have another history from now on."""
        self._ghosts.remove(run)
        lower = self._new_run(run.blocks[-1], run.hashes[len(run.blocks) :])
        lower.used_at, lower.pace, lower.growing = run.used_at, run.pace, False
        del run.hashes[len(run.blocks) :]
        run.growing = False
        self._ghosts.add(lower)


class AdaptiveQueue:
    """Runs whose last block is evictable, by pace and time of last use.

    Within a pace the run to go is the one that was used longest ago or the one that was used last: worth rises and
    falls again with age, or only falls, so that it is least at an end.
    """

    def __init__(self, policy: AdaptivePolicy) -> None:
        self._policy = policy
        self._ends = [_Ends(self, policy.is_evictable) for _ in range(NUM_PACES)]
        self._chosen: Run | None = None
        self._chosen_at = -1

    def add(self, block: int, child: int | None = None) -> None:
        """The block is evictable now, and so is the last of its run."""
        run = self._policy.run_of(block)
        if run.queue is self and run.queued_at == run.used_at:
            return
        run.queue, run.queued_at = self, run.used_at
        self._ends[run.pace].add(run)
        self._chosen = None

    def rank(self) -> float | None:
        """Worth of the next victim, or in LRU's order its age; lower goes first. None where there is none."""
        run, policy = self._choose(), self._policy
        if run is None:
            return None
        age = policy.clock - run.used_at
        return -age if policy.cautious else policy.worth(run) - age * _TIE

    def pop(self) -> int | None:
        """Take the next victim, or None where there is none."""
        run = self._choose()
        return None if run is None else self._policy.take(run)

    def succeeds(self, parent: int, child: int) -> bool:
        """Take the evicted child's parent too where it is of the same run: a run goes whole."""
        run = self._policy.losing()
        if run is None or not run.blocks or run.blocks[-1] != parent:
            return False
        self._policy.take(run)
        return True

    def order(self) -> list[int]:
        """The last blocks of all runs, next victim first, were none of their parents to follow. Sorts."""
        paces = [ends.runs() for ends in self._ends]
        order: list[int] = []
        while any(paces):
            run = self._least([runs[0] for runs in paces if runs], [runs[-1] for runs in paces if runs])
            paces[run.pace].remove(run)
            order.append(run.blocks[-1])
        return order

    def _choose(self) -> Run | None:
        chosen, policy = self._chosen, self._policy
        if chosen is not None and self._chosen_at == policy.clock and self._stands(chosen):
            return chosen
        oldest = [run for ends in self._ends if (run := ends.oldest()) is not None]
        youngest = [run for ends in self._ends if (run := ends.youngest()) is not None]
        self._chosen = self._least(oldest, youngest) if oldest else None
        self._chosen_at = policy.clock
        return self._chosen

    def _stands(self, run: Run) -> bool:
        return run.queue is self and bool(run.blocks) and self._policy.is_evictable(run.blocks[-1])

    def _least(self, oldest: Sequence[Run], youngest: Sequence[Run]) -> Run:
        worth = self._policy.worth
        first = min(oldest, key=lambda run: run.used_at)
        least = min((*oldest, *youngest), key=lambda run: (worth(run), run.used_at))
        if self._policy.cautious:
            return first
        return least if worth(least) < CLEARLY_LESS * worth(first) else first


class _Ends:
    """Runs of one pace in a queue, oldest and youngest at hand: two heaps with lazy deletion.

    An entry is stale when its run is no longer evictable, was used since, or went to another queue.
    """

    def __init__(self, queue: AdaptiveQueue, is_evictable: Callable[[int], bool]) -> None:
        self._queue = queue
        self._is_evictable = is_evictable
        self._oldest: list[tuple[int, int, Run]] = []
        self._youngest: list[tuple[int, int, Run]] = []
        self._compact_at = 64

    def add(self, run: Run) -> None:
        heappush(self._oldest, (run.used_at, run.number, run))
        heappush(self._youngest, (-run.used_at, run.number, run))
        if len(self._oldest) > self._compact_at or len(self._youngest) > self._compact_at:
            self._compact()

    def oldest(self) -> Run | None:
        return self._first(self._oldest, 1)

    def youngest(self) -> Run | None:
        return self._first(self._youngest, -1)

    def runs(self) -> list[Run]:
        """All of them, oldest first."""
        self._compact()
        return [run for _, _, run in sorted(self._oldest)]

    def _first(self, heap: list[tuple[int, int, Run]], sign: int) -> Run | None:
        while heap:
            used_at, _, run = heap[0]
            if self._stands(run, sign * used_at):
                return run
            heappop(heap)
        return None

    def _stands(self, run: Run, used_at: int) -> bool:
        """Whether an entry is not stale. A run that is not evictable has to be added again when it is."""
        if run.queue is not self._queue or run.queued_at != used_at or run.used_at != used_at:
            return False
        if run.blocks and self._is_evictable(run.blocks[-1]):
            return True
        run.queued_at = -1
        return False

    def _compact(self) -> None:
        """Drop stale entries; the next time is when there are twice as many as remain, so the cost is constant."""
        runs = {run for used_at, _, run in self._oldest if self._stands(run, used_at)}
        self._oldest = [(run.used_at, run.number, run) for run in runs]
        self._youngest = [(-run.used_at, run.number, run) for run in runs]
        heapify(self._oldest)
        heapify(self._youngest)
        self._compact_at = max(64, 2 * len(runs))
