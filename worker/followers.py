"""Calls that wait for a prefix which another call is computing, so that a burst of equal prompts costs one prefill."""

from typing import NamedTuple

from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.prompt import Prompt
from prefixgate.worker.request import Request


class _Wait(NamedTuple):
    blocks: int
    """Blocks that the call can have from its leader."""
    until: int
    """The step in which the call has waited long enough."""


class Followers:
    """Who waits for whom. Waiting ends with the common prefix, with the leader, and after a number of steps."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._groups: dict[BlockTable, dict[Request, _Wait]] = {}
        self._leaders: dict[Request, BlockTable] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self._leaders

    def common_blocks(self, prompt: Prompt, leader: BlockTable) -> int:
        """Blocks that a prompt can have from a leader; its last token is computed in any case, and its block too."""
        usable = (prompt.num_tokens - 1) // self._block_size
        pairs = zip(prompt.contents[:usable], leader.contents, strict=False)
        differing = (block for block, (own, other) in enumerate(pairs) if own != other)
        return next(differing, min(usable, len(leader.contents)))

    def add(self, request: Request, leader: BlockTable, blocks: int, *, until: int) -> None:
        """Let a call wait until a table has published so many blocks, at most until a step."""
        self._groups.setdefault(leader, {})[request] = _Wait(blocks, until)
        self._leaders[request] = leader

    def remove(self, request: Request) -> None:
        """Forget a call that no longer waits."""
        leader = self._leaders.pop(request)
        group = self._groups[leader]
        del group[request]
        if not group:
            del self._groups[leader]

    def take_ready(self, step: int) -> list[Request]:
        """Forget and return the calls whose waiting has ended. Those that waited in vain follow nobody again."""
        ready = []
        for leader, group in self._groups.items():
            is_over = leader.released or leader.frontier is None
            for request, wait in group.items():
                if is_over or leader.num_published >= wait.blocks:
                    ready.append(request)
                elif step >= wait.until:
                    request.may_follow = False
                    ready.append(request)
        for request in ready:
            self.remove(request)
        return ready
