"""What a step must do to the pool's bytes before its forward pass may run."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Copy(NamedTuple):
    """The first ``tokens`` slots of every (layer, k|v) of block ``src`` go to block ``dst``."""

    src: int
    dst: int
    tokens: int


@dataclass(eq=False, slots=True)
class CopyPlan:
    """The copies of one step, run once and in one launch, so in no order among themselves.

    Invariant: no block is both a source and a destination, and none is a destination twice. A source stays referenced
    until the plan is marked done, so it cannot be handed out and overwritten before the copy is ordered.
    """

    copies: list[Copy] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    """Blocks handed out since the last plan, whose old content must never be read (poisoned in tests, before the
    copies run)."""

    def __bool__(self) -> bool:
        return bool(self.copies or self.fresh)
