"""What workers will hold soon: the blocks of prompts that were just sent to them."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeAlias

from prefixgate.cache.hashing import BlockHash

MAX_BLOCKS = 1 << 17
"""Predicted blocks in all, each as often as it was predicted: 64 prompts of 32,768 tokens."""

_Owner: TypeAlias = tuple[str, str]
"""A worker and a tenant."""


class Predictions:
    """Blocks by worker, each until its time is over or the worker has said what became of it.

    Without them a burst of equal prompts would be spread before the first of them is computed. A call that ends early
    takes nothing back: what it expected is over in seconds, and most of it is computed and kept anyway.
    """

    def __init__(self, clock: Callable[[], float], *, max_blocks: int = MAX_BLOCKS) -> None:
        self.num_blocks = 0
        self._clock = clock
        self._max_blocks = max_blocks
        # By worker and tenant: as many as there can be, so empty ones may stay.
        self._until: defaultdict[_Owner, dict[BlockHash, float]] = defaultdict(dict)
        # By the time at which they end; the number keeps equal times apart.
        self._ends: list[tuple[float, int, _Owner, Sequence[BlockHash]]] = []
        self._noted = 0  # blocks in these, each as often as it was added: what the bound is for
        self._numbers = count()

    def add(self, worker: str, tenant: str, hashes: Sequence[BlockHash], seconds: float) -> None:
        """Expect a worker to hold a tenant's blocks for the seconds to come.

        Of more than there is room for, the last blocks are left out, and for the others what would end first goes.
        """
        hashes = hashes[: self._max_blocks]
        now = self._clock()
        while self._ends and (self._ends[0][0] <= now or self._noted + len(hashes) > self._max_blocks):
            until, _, other, ended = heapq.heappop(self._ends)
            self._noted -= len(ended)
            self._drop(other, ended, until)
        if not hashes:
            return
        until = now + seconds
        owner = worker, tenant
        entries = self._until[owner]
        before = len(entries)
        for block_hash in hashes:
            if entries.get(block_hash, 0.0) < until:
                entries[block_hash] = until
        self.num_blocks += len(entries) - before
        self._noted += len(hashes)
        heapq.heappush(self._ends, (until, next(self._numbers), owner, hashes))

    def has(self, worker: str, tenant: str, block_hash: BlockHash) -> bool:
        """Whether a worker is expected to hold a tenant's block now."""
        entries = self._until.get((worker, tenant))
        return entries is not None and entries.get(block_hash, 0.0) > self._clock()

    def confirm(self, worker: str, tenant: str, hashes: Sequence[BlockHash]) -> None:
        """The worker holds these, or has just let go of them: what it says counts from now on."""
        entries = self._until.get((worker, tenant))
        if entries:
            before = len(entries)
            for block_hash in hashes:
                entries.pop(block_hash, None)
            self.num_blocks -= before - len(entries)

    def forget(self, worker: str, tenant: str = "") -> None:
        """Drop what was expected of a worker, for one tenant or, where none is given, for all."""
        for owner in [owner for owner in self._until if owner[0] == worker and tenant in ("", owner[1])]:
            self.num_blocks -= len(self._until.pop(owner))

    def _drop(self, owner: _Owner, hashes: Sequence[BlockHash], until: float) -> None:
        entries = self._until.get(owner)
        if entries:
            before = len(entries)
            for block_hash in hashes:
                if entries.get(block_hash, until + 1) <= until:
                    del entries[block_hash]
            self.num_blocks -= before - len(entries)
