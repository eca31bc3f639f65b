"""Gathers the copies of a step so that they can run in any order, and keeps their sources alive until they have."""

from collections.abc import Callable

from prefixgate.cache.accounts import Account
from prefixgate.cache.block_pool import BlockPool
from prefixgate.cache.copy_plan import Copy, CopyPlan


class CopyPlanner:
    """The copies planned since the last plan was run, by destination.

    The order in which a copy comes about: its source is held, its destination taken (which may evict, but not the
    source), the copy planned and later ordered before whatever the step writes, and only then the source released.
    The planner owns one reference to each planned source and gives it back through ``release_source``.
    """

    def __init__(self, pool: BlockPool, release_source: Callable[[int, Account], None]) -> None:
        self._pool = pool
        self._release_source = release_source
        self._planned: dict[int, tuple[Copy, Account]] = {}
        self._fresh: list[int] = []
        self.copies_total = 0

    def planned(self) -> list[Copy]:
        return [copy for copy, _ in self._planned.values()]

    def fills(self, block: int) -> bool:
        """Whether a planned copy is still to bring what a block holds."""
        return block in self._planned

    def readers(self, block: int) -> int:
        """How many planned copies read a block, each with a reference of its own."""
        return sum(1 for copy, _ in self._planned.values() if copy.src == block)

    def fresh(self, blocks: list[int]) -> None:
        """Note blocks that were handed out, whose content is another's."""
        self._fresh += blocks

    def add(self, copy: Copy, account: Account) -> None:
        """Plan a copy between two blocks of one tenant, taking over one reference to its source.

        A source that is itself only planned to be filled is replaced by where its content will come from, so that no
        block is source and destination in one plan. What lies beyond its planned tokens is not written yet.
        """
        earlier = self._planned.get(copy.src)
        if earlier is not None:
            first = earlier[0]
            self._pool.hold((first.src,), account)
            self._release_source(copy.src, account)
            copy = Copy(first.src, copy.dst, min(copy.tokens, first.tokens))
        self._planned[copy.dst] = copy, account
        self.copies_total += 1

    def forget(self, destination: int) -> None:
        """Drop the copy into a block whose last holder let go of it before the copy ran."""
        if destination in self._planned:
            copy, account = self._planned.pop(destination)
            self.copies_total -= 1
            self._release_source(copy.src, account)

    def run(self, execute: Callable[[CopyPlan], None]) -> None:
        """Have the plan executed, then release its sources.

        One call and not two, so that nothing can be taken or released while a plan is under way. ``execute`` returns
        once the copies are ordered before what the step will write; on a device that means enqueued.
        """
        planned, plan = self._planned, CopyPlan(self.planned(), self._fresh)
        self._planned, self._fresh = {}, []
        try:
            execute(plan)
        finally:
            for copy, account in planned.values():
                self._release_source(copy.src, account)
