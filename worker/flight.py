"""A step between its launch and its landing, and what comes of it."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from prefixgate.worker.device_sampler import Awaited
from prefixgate.worker.logprobs import TokenLogprob
from prefixgate.worker.request import End, Request
from prefixgate.worker.sampler import Choice
from prefixgate.worker.sequence import Sequence as Output
from prefixgate.worker.step_plan import Chunk


class Lines(NamedTuple):
    """One chunk's lines ``[start, stop)`` of the logits ``[L, V]`` that it was computed with."""

    logits: torch.Tensor
    start: int
    stop: int


class Turn(NamedTuple):
    """An output whose next token is to be chosen from the last of these lines."""

    request: Request
    output: Output
    lines: Lines


@dataclass(slots=True)
class StepResult:
    """What came of a step."""

    sampled: list[tuple[Turn, Choice]] = field(default_factory=list)
    """The next tokens of outputs."""
    prefilled: list[Chunk] = field(default_factory=list)
    """What was computed of prompts that nothing is to be sampled behind."""
    prompt_logprobs: list[tuple[Request, list[TokenLogprob]]] = field(default_factory=list)
    """Those of the next tokens of prompts, at most one list for each call."""
    failed: dict[Request, End] = field(default_factory=dict)
    """Calls that must end, and how."""
    computed_tokens: int = 0


@dataclass(slots=True)
class Flight:
    """A step that was launched."""

    computed: list[tuple[Chunk, Lines]]
    result: StepResult
    """So far: calls that failed before anything ran."""
    tried: bool
    """Whether there was anything to compute."""
    num_ahead: int = 0
    """Steps in a row, this one included, that were launched behind others and not planned by the scheduler."""
    turns: list[Turn] = field(default_factory=list)
    """The outputs that a token was chosen for on the device, in the order of ``awaited``."""
    awaited: Awaited | None = None
    """None where tokens are chosen at landing."""

    @property
    def is_wanted(self) -> bool:
        """Whether any of its sequences still is: outputs can have ended since its launch."""
        return any(chunk.sequence.table is not None for chunk, _ in self.computed)
