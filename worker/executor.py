"""From the chunks of one step to its sampled tokens.

The order is the cache's: copy, compute, publish, fork, sample. What can be pinned on one call ends that call;
its blocks are released by the engine when the step is over, since letting go of them amid the step could hand them out
while this step still writes them.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import torch
from grpc import StatusCode

from prefixgate.cache.copy_plan import CopyPlan
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.logprobs import TokenLogprob
from prefixgate.worker.model_runner import ModelRunner, Row
from prefixgate.worker.prompt_logprobs import take_prompt_logprobs, wants_all_logits
from prefixgate.worker.request import End, Request
from prefixgate.worker.sampler import Choice, Sampler
from prefixgate.worker.sampling import finite_rows
from prefixgate.worker.sequence import Sequence as Output
from prefixgate.worker.step_plan import Chunk

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""Steps in a row without one row that computes, after which the fault is taken to be the model's or the device's."""

FAULT = End(StatusCode.INTERNAL, "the call failed in the worker")
"""All that a client hears of an exception: its text can hold another client's data."""

NON_FINITE = End(StatusCode.INTERNAL, "the model gave non-finite logits")


class ExecutorFailedError(Exception):
    """No call at all can be computed any more."""


class _Lines(NamedTuple):
    """One chunk's lines ``[start, stop)`` of the logits ``[L, V]`` that it was computed with."""

    logits: torch.Tensor
    start: int
    stop: int
    finite: bool


class Turn(NamedTuple):
    """An output whose next token is to be chosen from the last of these lines."""

    request: Request
    output: Output
    lines: _Lines


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
        self._sampler = Sampler(frozenset(runner.spec.eos_ids))
        self._failed_steps = 0

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        """Compute the chunks of one step. Raises ExecutorFailedError when the model computes nothing any more."""
        result = StepResult()
        self._run_copies()
        computed = self._isolated(chunks, self._forward, result)
        self._watch(tried=bool(chunks), computed=bool(computed))
        result.computed_tokens = sum(chunk.num_tokens for chunk, _ in computed)
        turns = self._commit(computed, result)
        result.sampled = self._isolated(turns, self._sample, result)
        return result

    def _run_copies(self) -> None:
        """Run the copies that admissions and shared tails need, before anything reads or writes their blocks.

        Those of calls that failed meanwhile are run too: until a plan is done its sources stay held.
        """
        self._cache.run_plan(self._run_plan)

    def _run_plan(self, plan: CopyPlan) -> None:
        if self._poison:
            self._runner.storage.poison(plan.fresh)
        if plan.copies:
            self._runner.storage.copy_blocks(plan.copies)

    def _forward(self, chunks: Sequence[Chunk]) -> Sequence[_Lines]:
        rows = [_row(chunk) for chunk in chunks]
        logits = self._runner.forward(rows)
        finite = finite_rows(logits)
        stops = list(itertools.accumulate([len(row.token_ids) if row.needs_all_logits else 1 for row in rows]))
        if stops[-1] != len(logits):
            raise RuntimeError(f"the model gave {len(logits)} lines of logits for {stops[-1]} tokens")
        if stops[-1] == len(rows):
            return [_Lines(logits, line, line + 1, is_finite) for line, is_finite in enumerate(finite)]
        return [_Lines(logits, start, stop, all(finite[start:stop])) for start, stop in itertools.pairwise([0, *stops])]

    def _watch(self, *, tried: bool, computed: bool) -> None:
        if computed:
            self._failed_steps = 0
        elif tried:
            self._failed_steps += 1
            if self._failed_steps == MAX_FAILED_STEPS:
                raise ExecutorFailedError(f"nothing could be computed in {MAX_FAILED_STEPS} steps in a row")

    def _commit(self, computed: Sequence[tuple[Chunk, _Lines]], result: StepResult) -> list[Turn]:
        """Count and publish what was computed, and tell whose next token can be chosen.

        Logits that are not finite say that some slot below them is not either, so what they were computed from is not
        published. That is why every chunk of a prompt is asked for logits, and not its last one alone.
        """
        turns: list[Turn] = []
        for chunk, lines in computed:
            request = chunk.request
            if not lines.finite:
                result.failed.setdefault(request, NON_FINITE)
            if request in result.failed:
                continue
            if request.sampling.prompt_logprobs is not None:
                try:
                    self._tell_prompt(chunk, lines, result)
                except Exception as error:
                    self._fail(request, error, result)
                    continue
            # Outside of that: what the cache raises is nobody's fault but its own, and ends the engine.
            outputs = self._advance(chunk)
            if request.prefill_only:
                result.prefilled.append(chunk)
                continue
            for output in outputs:
                turns.append(Turn(request, output, lines))  # noqa: PERF401 - mostly there is one
        return turns

    def _tell_prompt(self, chunk: Chunk, lines: _Lines, result: StepResult) -> None:
        request, start = chunk.request, chunk.sequence.num_computed
        if wants_all_logits(request, start + chunk.num_tokens):
            logits = lines.logits[lines.start : lines.stop]
            result.prompt_logprobs.append((request, take_prompt_logprobs(request, start, logits)))

    def _advance(self, chunk: Chunk) -> Sequence[Output]:
        """Publish one chunk's blocks. Returns the outputs that wait for a token."""
        sequence = chunk.sequence
        assert sequence.table is not None
        sequence.num_computed += chunk.num_tokens
        if sequence.num_computed // self._cache.block_size > sequence.table.num_published:
            self._cache.publish(sequence.table, sequence.num_computed)
        if sequence.num_uncomputed:
            return ()
        return self._fork(chunk.request, sequence) if sequence is chunk.request.carrier else (sequence,)

    def _fork(self, request: Request, carrier: Output) -> Sequence[Output]:
        """Give each output that is still wanted a table over the computed prompt."""
        assert carrier.table is not None
        outputs = request.unfinished
        for output in outputs:
            output.token_ids = output.token_ids or list(carrier.token_ids)
            output.num_computed = carrier.num_computed
        heir, *others = outputs
        for output in others:
            output.table = self._cache.fork(carrier.table, output.token_ids)
        # The table reads the list of the sequence that it belongs to.
        heir.table, heir.table.token_ids = carrier.table, heir.token_ids
        request.carrier = carrier.table = None
        return [output for output in outputs if not output.num_uncomputed]

    def _sample(self, turns: Sequence[Turn]) -> Sequence[Choice]:
        return self._sampler.choose(_last_lines(turns), [(turn.request.sampling, turn.output) for turn in turns])

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
    request, sequence, count = chunk
    start, table = sequence.num_computed, sequence.table
    assert table is not None
    wants_all = request.sampling.prompt_logprobs is not None and wants_all_logits(request, start + count)
    token_ids = sequence.token_ids[start : start + count]
    return Row(token_ids, start, table.block_ids, request.scope, True, wants_all)


def _last_lines(turns: Sequence[Turn]) -> torch.Tensor:
    """Gather the logits ``[R, V]`` to choose from; not copied where they are all that the model gave."""
    logits, wanted = turns[0].lines.logits, [turn.lines.stop - 1 for turn in turns]
    if any(turn.lines.logits is not logits for turn in turns):
        return torch.stack([turn.lines.logits[line] for turn, line in zip(turns, wanted, strict=True)])
    return logits if wanted == list(range(len(logits))) else logits[wanted]
