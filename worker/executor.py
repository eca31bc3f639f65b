"""From the chunks of one step to its sampled tokens.

The order is the cache's: make writable, copy, compute, publish, fork, sample. What can be pinned on one call ends that
call; its blocks are released by the engine when the step is over, since letting go of them amid the step could hand
them out while this step still writes them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import torch
from grpc import StatusCode

from prefixgate.cache.copy_plan import CopyPlan
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.model_runner import ModelRunner, Row
from prefixgate.worker.request import End, Request
from prefixgate.worker.sampling import Draw, finite_rows, sample, uniform
from prefixgate.worker.scheduler import Chunk
from prefixgate.worker.sequence import Sequence as Output

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""Steps in a row without one row that computes, after which the fault is taken to be the model's or the device's."""

FAULT = End(StatusCode.INTERNAL, "the call failed in the worker")
"""All that a client hears of an exception: its text can hold another client's data."""

NON_FINITE = End(StatusCode.INTERNAL, "the model gave non-finite logits")


class ExecutorFailedError(Exception):
    """No call at all can be computed any more."""


class Sampled(NamedTuple):
    """The next token of an output."""

    request: Request
    output: Output
    token_id: int


@dataclass(slots=True)
class StepResult:
    """What came of a step."""

    sampled: list[Sampled] = field(default_factory=list)
    failed: dict[Request, End] = field(default_factory=dict)
    """Calls that must end, and how."""
    computed_tokens: int = 0


class _Turn(NamedTuple):
    """An output whose next token is to be chosen, and the logits to choose it from."""

    request: Request
    output: Output
    logits: torch.Tensor


class _OfRequest(Protocol):
    @property
    def request(self) -> Request: ...


Item = TypeVar("Item", bound=_OfRequest)
Outcome = TypeVar("Outcome")


class Executor:
    """Runs chunks on the model and the pool. Runs on the engine's thread."""

    def __init__(self, runner: ModelRunner, cache: PrefixCache, *, poison: bool) -> None:
        self._runner = runner
        self._cache = cache
        self._poison = poison
        self._failed_steps = 0

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        """Compute the chunks of one step. Raises ExecutorFailedError when the model computes nothing any more."""
        result = StepResult()
        ready = self._make_writable(chunks, result)
        self._run_copies()
        computed = self._isolated(ready, self._forward, result)
        self._watch(tried=bool(ready), computed=bool(computed))
        result.computed_tokens = sum(chunk.num_tokens for chunk, _ in computed)
        turns = self._commit(computed, result)
        for turn, token_id in self._isolated(turns, self._sample, result):
            result.sampled.append(Sampled(turn.request, turn.output, token_id))
        return result

    def _make_writable(self, chunks: Sequence[Chunk], result: StepResult) -> list[Chunk]:
        ready = []
        for chunk in chunks:
            table, start = chunk.sequence.table, chunk.sequence.num_computed
            assert table is not None
            try:
                chunk.request.usage.copied_blocks += self._cache.writable(table, start, start + chunk.num_tokens)
            except Exception as error:
                self._fail(chunk.request, error, result)
            else:
                ready.append(chunk)
        return ready

    def _run_copies(self) -> None:
        """Run the copies that admissions and shared tails need, before anything reads or writes their blocks.

        Those of a call that failed above are run too: until a plan is done its sources stay held.
        """
        self._cache.run_plan(self._run_plan)

    def _run_plan(self, plan: CopyPlan) -> None:
        if self._poison:
            self._runner.storage.poison(plan.fresh)
        if plan.copies:
            self._runner.storage.copy_blocks(plan.copies)

    def _forward(self, chunks: Sequence[Chunk]) -> Sequence[torch.Tensor]:
        return list(self._runner.forward([_row(chunk) for chunk in chunks]))

    def _watch(self, *, tried: bool, computed: bool) -> None:
        if computed:
            self._failed_steps = 0
        elif tried:
            self._failed_steps += 1
            if self._failed_steps == MAX_FAILED_STEPS:
                raise ExecutorFailedError(f"nothing could be computed in {MAX_FAILED_STEPS} steps in a row")

    def _commit(self, computed: Sequence[tuple[Chunk, torch.Tensor]], result: StepResult) -> list[_Turn]:
        """Count and publish what was computed, and tell whose next token can be chosen.

        Logits that are not finite say that some slot below them is not either, so what they were computed from is not
        published. That is why every chunk of a prompt is asked for logits, and not its last one alone.
        """
        turns: list[_Turn] = []
        finite = finite_rows(torch.stack([logits for _, logits in computed])) if computed else []
        for (chunk, logits), is_finite in zip(computed, finite, strict=True):
            if not is_finite:
                result.failed.setdefault(chunk.request, NON_FINITE)
            if chunk.request in result.failed:
                continue
            try:
                turns += [_Turn(chunk.request, output, logits) for output in self._advance(chunk)]
            except Exception as error:
                self._fail(chunk.request, error, result)
        return turns

    def _advance(self, chunk: Chunk) -> Sequence[Output]:
        """Publish one chunk's blocks. Returns the outputs that wait for a token."""
        sequence = chunk.sequence
        assert sequence.table is not None
        sequence.num_computed += chunk.num_tokens
        self._cache.publish(sequence.table, sequence.num_computed)
        if sequence.num_uncomputed:
            return ()
        return (sequence,) if chunk.request.prompt_computed else self._fork(chunk.request)

    def _fork(self, request: Request) -> Sequence[Output]:
        """Give each output that is still wanted a table over the computed prompt."""
        carrier, (heir, *others) = request.carrier, request.unfinished
        assert carrier.table is not None
        for output in others:
            output.token_ids = list(carrier.token_ids)
            output.table = self._cache.fork(carrier.table, output.token_ids)
            output.num_computed = carrier.num_computed
        if heir is not carrier:
            # The carrier's own output was cancelled. Its list goes along, as the table reads that very list.
            heir.token_ids, heir.table, heir.num_computed = carrier.token_ids, carrier.table, carrier.num_computed
            carrier.table = None
        return heir, *others

    def _sample(self, turns: Sequence[_Turn]) -> Sequence[int]:
        if not turns:
            return []
        return sample(torch.stack([turn.logits for turn in turns]), [_draw(turn) for turn in turns])

    def _isolated(
        self, items: Sequence[Item], compute: Callable[[Sequence[Item]], Sequence[Outcome]], result: StepResult
    ) -> list[tuple[Item, Outcome]]:
        """Compute a batch; where that raises, each item alone, so that only the calls at fault end."""
        if not items:
            return []
        try:
            return list(zip(items, compute(items), strict=True))
        except Exception:
            logger.exception("A batch of %d failed and is run one by one", len(items))
        done: list[tuple[Item, Outcome]] = []
        for item in items:
            try:
                done += zip([item], compute([item]), strict=True)
            except Exception as error:
                self._fail(item.request, error, result)
        return done

    def _fail(self, request: Request, error: Exception, result: StepResult) -> None:
        logger.error("A call of tenant %r failed", request.scope.tenant, exc_info=error)
        result.failed.setdefault(request, FAULT)


def _row(chunk: Chunk) -> Row:
    sequence, start = chunk.sequence, chunk.sequence.num_computed
    assert sequence.table is not None
    return Row(
        token_ids=sequence.token_ids[start : start + chunk.num_tokens],
        start=start,
        block_ids=sequence.table.block_ids,
        scope=chunk.request.scope,
        needs_logits=True,
    )


def _draw(turn: _Turn) -> Draw:
    sampling = turn.request.sampling
    draw = Draw(sampling.temperature, sampling.top_k, sampling.top_p)
    if draw.greedy:
        return draw
    return draw._replace(uniform=uniform(sampling.seed, turn.output.index, turn.output.num_output))
