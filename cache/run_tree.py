"""The runs of what is cached and of what was evicted lately: how they begin, grow, part and return."""

from collections.abc import Iterable, Sequence

from prefixgate.cache.ghosts import Ghosts
from prefixgate.cache.runs import NO_BLOCK, Run, num_common

GHOSTS_PER_BLOCK = 4
"""Evicted blocks remembered for each block of the pool. With one, the intervals that matter in a pool that thrashes
are longer than what is remembered; more than eight change nothing."""


class RunTree:
    """Which run each block belongs to. A run's last block is the only one that other runs stand below."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._run_of: list[Run | None] = [None] * num_blocks
        self._num_runs = 0
        self._ghosts = Ghosts(GHOSTS_PER_BLOCK * num_blocks)
        self.losing: Run | None = None
        """The run that blocks are being evicted from; it is remembered when that ends."""

    def run_of(self, block: int) -> Run:
        run = self._run_of[block]
        assert run is not None, f"block {block} was not published"
        return run

    def publish(self, parent: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Add a path of new nodes below ``parent``, which is a root where it is no block's number."""
        above = self._run_of[parent] if parent < self._num_blocks else None
        if above is not None and above.growing and above.blocks[-1] == parent and not above.num_evicted:
            # What a decoding sequence does with each block.
            self._grow(above, blocks)
            above.hashes += hashes
            return
        self.remember()
        above = self._ending_at(parent) if parent < self._num_blocks else None
        done = 0
        if above is None:
            parent = NO_BLOCK
        elif above.num_evicted:
            done = self._restore(above, blocks, hashes)
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

    def keep_tail(self, parent: int, block: int) -> None:
        """Add a node without a hash."""
        self.remember()
        above = self._ending_at(parent) if parent < self._num_blocks else None
        if above is not None and above.num_evicted:
            self._set_apart(above)
        run = above if above is not None and above.growing else self._new_run(parent if above else NO_BLOCK, ())
        self._grow(run, (block,))
        run.hashes.append(None)

    def path_to(self, block: int) -> Iterable[Run]:
        """The runs of the path that ends at a block, last first."""
        self.remember()
        run = self._ending_at(block)
        if run.num_evicted:
            self._set_apart(run)
        yield run
        while run.parent != NO_BLOCK:
            run = self.run_of(run.parent)
            yield run

    def evict(self, run: Run) -> int:
        """Take a run's last cached block."""
        if run is not self.losing:
            self.remember()
            self.losing = run
            if run.remembered_as is not None:
                self._ghosts.remove(run)
        block = run.blocks.pop()
        if run.hashes[-1] is None:
            run.hashes.pop()
        self._run_of[block] = None
        return block

    def remember(self) -> None:
        """Put what was evicted since the last call into the directory."""
        run, self.losing = self.losing, None
        if run is not None and run.num_evicted:
            self._ghosts.add(run)

    def discard(self, block: int) -> None:
        """Take a node without children out and forget it."""
        self.remember()
        run = self.run_of(block)
        if run.remembered_as is not None:
            self._ghosts.forget(run)
        run.blocks.pop()
        run.hashes.pop()
        self._run_of[block] = None

    def _new_run(self, parent: int, hashes: Iterable[bytes | None]) -> Run:
        self._num_runs += 1
        return Run(self._num_runs, parent, [], list(hashes))

    def _grow(self, run: Run, blocks: Sequence[int]) -> None:
        run.blocks += blocks
        run_of = self._run_of
        for block in blocks:
            run_of[block] = run

    def _ending_at(self, block: int) -> Run:
        """The run whose last cached block this is; made by parting one where a path ends or forks inside it."""
        run = self.run_of(block)
        if run.blocks[-1] == block:
            return run
        end = run.blocks.index(block) + 1
        # The lower part stays the same object: it may stand in a queue or in the directory. The cost is that of a few
        # instructions for each block of the path that ends here.
        upper = self._new_run(run.parent, run.hashes[:end])
        upper.used_at, upper.pace, upper.growing = run.used_at, run.pace, False
        self._grow(upper, run.blocks[:end])
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
