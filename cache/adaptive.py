"""Evicts what is worth least to keep, by what the pool has seen of the time until content is used again.

LRU is right where the pool retains content for longer than its users stay away. Where it does not, everything goes
just before it would be used, and almost any other order is better: then some content must be kept past its turn at
the expense of the rest. This policy keeps LRU's order unless what it has seen tells it otherwise, and then says which:
see ``intervals`` for the worth of a block. It never knows who waits, only how long, and how long it waited before.

A use is noted once for each *run* of blocks with one history (see ``runs``), not for each block. Intervals that end
after eviction are seen too, since evicted runs are remembered (see ``ghosts``).
"""

from collections.abc import Callable, Sequence
from operator import attrgetter

from prefixgate.cache.intervals import NUM_PACES, ReuseIntervals, bin_of
from prefixgate.cache.run_ends import RunEnds
from prefixgate.cache.run_tree import RunTree
from prefixgate.cache.runs import Run

CLEARLY_LESS = 0.8
"""Content goes before what LRU would evict only if it is worth less than this share of that: counts are noisy, and
where worth hardly differs LRU's order is the safer one."""

_used_at = attrgetter("used_at")
_TIE = 1e-12
"""Worth of a tick of age: where worth is equal, the older goes first."""


class AdaptivePolicy:
    """Knows the runs and when each was used, and learns from the time between."""

    name = "adaptive"

    def __init__(self, num_blocks: int, is_evictable: Callable[[int], bool]) -> None:
        self.is_evictable = is_evictable
        self.intervals = ReuseIntervals()
        self.runs = RunTree(num_blocks)
        self.clock = 0
        """Ticks with each use of a path."""

    def queue(self) -> "AdaptiveQueue":
        return AdaptiveQueue(self)

    def used(self, block: int) -> None:
        """A path that ends at this block was used just now, and with it every block above."""
        self.clock += 1
        intervals, now = self.intervals, self.clock
        for run in self.runs.path_to(block):
            if run.used_at:
                run.pace = intervals.renew(run.pace, now - run.used_at)
            else:
                intervals.begin()
            run.used_at = now
            run.growing = False
        intervals.tick()

    def published(self, parent: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """A path of new nodes stands below ``parent``, a root or a block; evicted ones among them are known again."""
        self.runs.publish(parent, blocks, hashes)

    def tail_kept(self, parent: int, block: int) -> None:
        """A node without a hash stands below ``parent``; it will never be a parent."""
        self.runs.keep_tail(parent, block)

    def discarded(self, block: int) -> None:
        """A node without children left by another way than eviction: it is not remembered."""
        self.runs.discard(block)

    def evicted(self, hashes: Sequence[bytes]) -> None:
        """What the queues gave out is gone."""
        self.runs.remember()

    def worth(self, run: Run) -> float:
        """Uses per tick that keeping the run on would bring."""
        return self.intervals.worth[run.pace][bin_of(self.clock + 1 - run.used_at)]

    def least(self, oldest: Sequence[Run], youngest: Sequence[Run]) -> Run:
        """The run to evict, of the oldest and the youngest of each pace."""
        first = min(oldest, key=_used_at)
        least, least_worth = first, CLEARLY_LESS * self.worth(first)
        for run in (*oldest, *youngest):
            worth = self.worth(run)
            if worth < least_worth or (worth == least_worth and run.used_at < least.used_at and least is not first):
                least, least_worth = run, worth
        return least


class AdaptiveQueue:
    """Runs whose last block is evictable, by pace and time of last use.

    Within a pace the run to go is the one that was used longest ago or the one that was used last: worth rises and
    falls again with age, or only falls, so that it is least at an end.
    """

    def __init__(self, policy: AdaptivePolicy) -> None:
        self._policy = policy
        self._paces = [RunEnds(policy.is_evictable) for _ in range(NUM_PACES)]
        self._chosen: Run | None = None
        self._chosen_at = -1
        self._rank = 0.0

    def add(self, block: int, child: int | None = None) -> None:
        """The block is evictable now, and so is the last of its run."""
        run = self._policy.runs.run_of(block)
        if self._paces[run.pace].add(run):
            self._chosen = None

    def rank(self) -> float | None:
        """Worth of the next victim, lower goes first; None where there is none."""
        return None if self._choose() is None else self._rank

    def pop(self) -> int | None:
        """Take the next victim, or None where there is none."""
        run = self._choose()
        return None if run is None else self._policy.runs.evict(run)

    def succeeds(self, parent: int, child: int) -> bool:
        """Take the evicted child's parent too where it is of the same run: a run goes whole."""
        runs = self._policy.runs
        run = runs.losing
        if run is None or not run.blocks or run.blocks[-1] != parent:
            return False
        runs.evict(run)
        return True

    def order(self) -> list[int]:
        """The last blocks of all runs, next victim first, were none of their parents to follow. Sorts."""
        paces = [ends.runs() for ends in self._paces]
        order: list[int] = []
        while any(paces):
            run = self._policy.least([runs[0] for runs in paces if runs], [runs[-1] for runs in paces if runs])
            paces[run.pace].remove(run)
            order.append(run.blocks[-1])
        return order

    def _choose(self) -> Run | None:
        """The next victim. Stays the same until something is used or added, so that it may be asked for twice."""
        chosen, policy = self._chosen, self._policy
        if chosen is None or self._chosen_at != policy.clock or not self._paces[chosen.pace].holds(chosen):
            oldest = [run for ends in self._paces if (run := ends.oldest()) is not None]
            youngest = [run for ends in self._paces if (run := ends.youngest()) is not None]
            self._chosen = policy.least(oldest, youngest) if oldest else None
            self._chosen_at = policy.clock
            if self._chosen is not None:
                self._rank = policy.worth(self._chosen) - _TIE * (policy.clock - self._chosen.used_at)
        return self._chosen
