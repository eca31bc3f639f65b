"""What a step is to compute, and what became of calls on the way there."""

from dataclasses import dataclass, field
from typing import NamedTuple

from prefixgate.worker.request import Request
from prefixgate.worker.sequence import Sequence

MAX_LOGIT_LINES = 256
"""Tokens of prompts in one step whose log-probabilities are asked for: each keeps a line of logits as long as the
vocabulary until the step ends, 1 MiB where that has 256 Ki ids, and about three times that while it is computed."""


class Chunk(NamedTuple):
    """The next ``num_tokens`` tokens of a sequence, at least one, to be computed in this step. It has their slots."""

    request: Request
    sequence: Sequence
    num_tokens: int


class Resumption(NamedTuple):
    """A call that was admitted again after a preemption."""

    request: Request
    carried_tokens: int
    """Tokens whose slots it needs before it can go on."""
    cached_tokens: int
    """Of these, those that need not be computed again."""


@dataclass(slots=True)
class StepPlan:
    """Filled by the scheduler, read by the engine."""

    budget: int
    """Tokens not given away yet."""
    logit_lines: int = MAX_LOGIT_LINES
    """Tokens whose log-probabilities can still be computed."""
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    """Calls that were admitted for the first time."""
    resumed: list[Resumption] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    failed: dict[Request, Exception] = field(default_factory=dict)
    """Calls that must end, and why. They may hold blocks, and have no chunks."""

    def add(self, chunk: Chunk) -> None:
        """Take a chunk in; its tokens come out of the budget."""
        self.chunks.append(chunk)
        self.budget -= chunk.num_tokens

    def drop(self, request: Request) -> int:
        """Take out the chunks of a call. Returns how many tokens became free."""
        dropped = sum(chunk.num_tokens for chunk in self.chunks if chunk.request is request)
        if dropped:
            self.chunks = [chunk for chunk in self.chunks if chunk.request is not request]
            self.budget += dropped
        return dropped
