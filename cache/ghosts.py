"""What was evicted lately, for the policy to learn from when it comes back."""

from prefixgate.cache.runs import Run


class Ghosts:
    """A bounded directory of evicted runs, found by the hash of their first evicted node.

    A run whose end was evicted stands here with its cached part; one entry for each run and not for each block, since
    what comes back comes back from the first missing block on. The oldest are forgotten when more than ``capacity``
    blocks are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._runs: dict[bytes, Run] = {}  # oldest first
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, block_hash: bytes) -> Run | None:
        return self._runs.get(block_hash)

    def add(self, run: Run) -> None:
        """Remember the evicted part of a run, which is not remembered at present."""
        first = run.hashes[len(run.blocks)]
        assert first is not None, "a tail is dropped and not remembered"
        earlier = self._runs.get(first)
        if earlier is not None:
            self.forget(earlier)
        run.remembered_as = first
        self._runs[first] = run
        self.num_blocks += run.num_evicted
        while self.num_blocks > self._capacity:
            self.forget(next(iter(self._runs.values())))

    def forget(self, run: Run) -> None:
        """Cut a run to what of it is cached."""
        self.remove(run)
        del run.hashes[len(run.blocks) :]

    def remove(self, run: Run) -> None:
        """Take a remembered run out, as it stands; to be called before it changes."""
        assert run.remembered_as is not None, "the run is not remembered"
        del self._runs[run.remembered_as]
        run.remembered_as = None
        self.num_blocks -= run.num_evicted
