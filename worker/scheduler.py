"""Who computes what in a step.

One budget of tokens per step. Sequences that decode come first, since each of them holds a stream open; prompts take
what is left, in chunks, in the order in which their calls were admitted; then waiting calls are admitted, first in,
first out. A call that cannot be admitted holds up those behind it: letting small ones pass would starve it for ever.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.request import Request, RequestState
from prefixgate.worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a worker's batch and queue."""

    max_batch_tokens: int
    """Tokens computed in one step."""
    max_running: int
    """Sequences that have been admitted and not finished."""
    max_waiting: int
    """Calls that wait for admission."""

    def __post_init__(self) -> None:
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens: {self.max_batch_tokens} must be at least max_running, {self.max_running}: "
                "each running sequence computes a token in every step"
            )


class Chunk(NamedTuple):
    """The next ``num_tokens`` tokens of a sequence, at least one, to be computed in this step."""

    request: Request
    sequence: Sequence
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """What a step is to compute, and which calls it admitted."""

    budget: int
    """Tokens not given away yet."""
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    """Calls whose admission raised. They own nothing and are no longer waiting."""

    def add(self, request: Request, sequence: Sequence) -> None:
        """Give a sequence as much of what it has to compute as the budget allows."""
        count = min(sequence.num_uncomputed, self.budget)
        if count:
            self.chunks.append(Chunk(request, sequence, count))
            self.budget -= count


class Scheduler:
    """The waiting and the running calls. Runs on the engine's thread."""

    def __init__(self, cache: PrefixCache, limits: Limits) -> None:
        self.limits = limits
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        """In order of arrival. They own no blocks: what they would hit is looked up at admission."""
        self.running: dict[Request, None] = {}
        """In order of admission."""
        self._cache = cache

    @property
    def num_running_sequences(self) -> int:
        """Outputs admitted and not finished, those that wait for their prompt included."""
        return sum(len(request.unfinished) for request in self.running)

    def add(self, request: Request) -> None:
        """Queue a call."""
        self.waiting[request] = None

    def remove(self, request: Request) -> None:
        """Forget a call that ended, wherever it stood."""
        self.waiting.pop(request, None)
        self.running.pop(request, None)

    def schedule(self) -> StepPlan:
        """Choose the chunks of the next step and admit what fits.

        With a call waiting and none running, the plan holds an admitted or a failed one: there is no step without
        progress.
        """
        plan = StepPlan(self.limits.max_batch_tokens)
        prefills = []
        for request in self.running:
            if not request.prompt_computed:
                prefills.append(request)
                continue
            for sequence in request.unfinished:
                plan.add(request, sequence)
        for request in prefills:
            plan.add(request, request.carrier)
        self._admit(plan)
        return plan

    def _admit(self, plan: StepPlan) -> None:
        num_running = self.num_running_sequences
        while self.waiting and plan.budget:
            request = next(iter(self.waiting))
            outputs = len(request.unfinished)
            if num_running + outputs > self.limits.max_running:
                return
            try:
                if not self._admit_one(request, outputs):
                    return
            except Exception as error:
                del self.waiting[request]
                plan.failed.append((request, error))
                continue
            num_running += outputs
            plan.admitted.append(request)
            plan.add(request, request.carrier)

    def _admit_one(self, request: Request, outputs: int) -> bool:
        """Move the first waiting call to the running ones, with all of its blocks or not at all."""
        admission = self._cache.admit(
            request.scope,
            request.carrier.token_ids,
            outputs=outputs,
            max_new_tokens=request.sampling.max_tokens,
            mode=request.cache_mode,
            retention=request.retention,
        )
        if admission is None:
            if not self.running:
                raise RuntimeError("an idle pool has no room for a call that it can hold")
            return False
        request.carrier.table = admission.table
        request.carrier.num_computed = admission.cached_tokens
        request.miss_reason = admission.miss_reason
        usage = request.usage
        usage.block_hit_tokens = admission.block_hit_tokens
        usage.partial_copy_tokens = admission.partial_copy_tokens
        usage.claimed_tail_tokens = admission.claimed_tail_tokens
        usage.copied_blocks = admission.copied_blocks
        del self.waiting[request]
        self.running[request] = None
        request.state = RequestState.RUNNING
        return True
