"""Who holds which block: reference counts and block states, and nothing of what is in them.

A block is in one of three states:

- *free*: no references, no content worth keeping; on the free list.
- *active*: at least one reference.
- *cached*: no references, but published in the index, so that it can be hit again or evicted.

Reference counts change in ``take``, ``hold`` and ``release`` and nowhere else; a block changes between free, active
and cached there and in ``reclaim``. The loops are written out, since they run once for each block of each call: a
method call for each block would double the cost of a hit. All blocks that one of these methods is given belong to one
tenant, whose account is kept along with the states.
"""

from collections.abc import Iterable, Sequence

from prefixgate.cache.accounts import Account


class NoFreeBlocksError(Exception):
    """A block was asked for and neither a free nor an evictable one is left."""


class BlockPool:
    """The only owner of reference counts and of block states."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks}; at least 1 is needed")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        """References of each block. To be read by anyone, to be written here."""
        self.owners = [0] * num_blocks
        """Number of the account that has each block; 0 for free ones. Read and written alike, so that the pool can be
        drawn from two lists that are copied as they are."""
        # Taken from the end, so that a fresh pool hands out 0, 1, 2, ... and a block freed last is reused first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return self.num_blocks - len(self._free) - self.num_cached

    def free_blocks(self) -> Sequence[int]:
        """The free list, next to be handed out last."""
        return tuple(self._free)

    def take(self, count: int, account: Account) -> list[int]:
        """Hand out free blocks, each with one reference. Raises NoFreeBlocksError and takes nothing when too few."""
        if count > len(self._free):
            raise NoFreeBlocksError(f"{count} blocks were asked for and {len(self._free)} are free")
        if not count:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        ref_counts, owners, number = self.ref_counts, self.owners, account.number
        for block in taken:
            ref_counts[block] = 1
            owners[block] = number
        account.active += count
        return taken

    def hold(self, blocks: Iterable[int], account: Account) -> int:
        """Add a reference to blocks that are active or cached. Returns how many were cached and are active now."""
        ref_counts, revived = self.ref_counts, 0
        for block in blocks:
            count = ref_counts[block]
            ref_counts[block] = count + 1
            if not count:
                revived += 1
        self.num_cached -= revived
        account.cached -= revived
        account.active += revived
        return revived

    def release(self, blocks: Iterable[int], account: Account, *, published: bool) -> int:
        """Drop a reference from blocks that are all published or all not. Returns how many have none left.

        Blocks without references become cached where they are published, and free where they are not.
        """
        ref_counts, owners, idle = self.ref_counts, self.owners, 0
        for block in blocks:
            count = ref_counts[block] - 1
            if count <= 0:
                if count < 0:
                    raise RuntimeError(f"block {block} was released more often than it was held")
                idle += 1
                if not published:
                    self._free.append(block)
                    owners[block] = 0
            ref_counts[block] = count
        account.active -= idle
        if published:
            self.num_cached += idle
            account.cached += idle
        return idle

    def reclaim(self, blocks: Sequence[int], account: Account) -> None:
        """Make cached blocks free: their content left the index."""
        owners = self.owners
        for block in blocks:
            owners[block] = 0
        self._free += blocks
        self.num_cached -= len(blocks)
        account.cached -= len(blocks)
