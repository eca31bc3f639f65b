"""From the chunks of one step to its sampled tokens.

A step is launched, and landed once it is done. To launch is to put all of it on the device in the cache's order: copy,
compute, and there choose tokens too. To land is to publish, to fork, and to tell what was chosen. On a CPU, where a
call returns with its result, tokens are chosen at landing, when it is known whose logits are finite.

What can be pinned on one call ends that call; its blocks are released by the engine when the step is over, since
letting go of them amid the step could hand them out while this step still writes them.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from grpc import StatusCode

from prefixgate.cache.copy_plan import CopyPlan
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.device_sampler import DeviceSampler
from prefixgate.worker.flight import Flight, Lines, StepResult, Turn
from prefixgate.worker.model_runner import AheadRunner, ModelRunner, Row
from prefixgate.worker.prompt_logprobs import take_prompt_logprobs, wants_all_logits
from prefixgate.worker.request import End, Request
from prefixgate.worker.sampler import NO_CHOICE, Choice, Sampler
from prefixgate.worker.sampling import finite_rows
from prefixgate.worker.sequence import Sequence as Output
from prefixgate.worker.step_plan import Chunk
from prefixgate.worker.transfers import upload

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""Steps in a row without one row that computes, after which the fault is taken to be the model's or the device's."""

FAULT = End(StatusCode.INTERNAL, "the call failed in the worker")
"""All that a client hears of an exception: its text can hold another client's data."""

NON_FINITE = End(StatusCode.INTERNAL, "the model gave non-finite logits")


class ExecutorFailedError(Exception):
    """No call at all can be computed any more."""


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
        eos_ids = frozenset(runner.spec.eos_ids)
        self._sampler = Sampler(eos_ids)
        self._device_sampler = DeviceSampler(eos_ids) if isinstance(runner, AheadRunner) and runner.is_ahead else None
        self._failed_steps = 0

    @property
    def goes_ahead(self) -> bool:
        """Whether a step can be launched behind one that has not landed."""
        return self._device_sampler is not None

    def launch(self, chunks: Sequence[Chunk]) -> Flight:
        """Put a step on the device. It must land before anything but ``launch_behind`` is asked for."""
        self._run_copies()
        result = StepResult()
        flight = Flight(self._isolated(chunks, self._forward, result), result, tried=bool(chunks))
        self._choose_ahead(flight, ahead=0)
        return flight

    def launch_behind(self, flight: Flight, chunks: Sequence[Chunk]) -> Flight | None:
        """Put the next tokens of outputs that have their turn in ``flight`` on the device before that has landed.

        Each chunk is one token, which the device alone knows yet. Returns None where that cannot be done: nothing is
        lost then, and the same tokens can be computed by ``launch`` later.
        """
        assert isinstance(self._runner, AheadRunner)
        assert flight.awaited is not None
        self._run_copies()
        try:
            place = {turn.output: index for index, turn in enumerate(flight.turns)}
            places = [place[chunk.sequence] for chunk in chunks]
            token_ids = flight.awaited.token_ids
            if places != list(range(len(flight.turns))):
                token_ids = token_ids.index_select(0, upload(np.array(places), token_ids.device))
            logits = self._runner.forward_ahead([_row(chunk, ahead=1) for chunk in chunks], token_ids)
            computed = [(chunk, Lines(logits, line, line + 1)) for line, chunk in enumerate(chunks)]
            behind = Flight(computed, StepResult(), tried=True, num_ahead=flight.num_ahead + 1)
            self._choose_ahead(behind, ahead=1)
        except Exception:
            logger.exception("A step of %d could not be launched ahead", len(chunks))
            return None
        return behind if behind.awaited is not None else None

    def land(self, flight: Flight) -> StepResult:
        """Wait for a step, and take over what it gave. Outputs that were let go of since its launch are left out.

        Raises ExecutorFailedError when the model computes nothing any more.
        """
        result = flight.result
        self._watch(tried=flight.tried, computed=bool(flight.computed))
        outcome = flight.awaited.wait() if flight.awaited is not None else None
        finite = _finite_chunks(flight.computed, outcome.finite if outcome is not None else None)
        computed = [
            (chunk, lines, is_finite)
            for (chunk, lines), is_finite in zip(flight.computed, finite, strict=True)
            if chunk.sequence.table is not None
        ]
        result.computed_tokens = sum(chunk.num_tokens for chunk, _, _ in computed)
        turns = self._commit(computed, result)
        if outcome is None:
            result.sampled = self._isolated(turns, self._sample, result)
        else:
            choices = dict(zip((turn.output for turn in flight.turns), outcome.choices, strict=True))
            for turn in turns:
                choice = choices[turn.output]
                if choice is None:
                    self._fail(turn.request, ValueError(NO_CHOICE), result)
                else:
                    result.sampled.append((turn, choice))
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

    def _forward(self, chunks: Sequence[Chunk]) -> Sequence[Lines]:
        rows = [_row(chunk) for chunk in chunks]
        logits = self._runner.forward(rows)
        stops = list(itertools.accumulate([len(row.token_ids) if row.needs_all_logits else 1 for row in rows]))
        if stops[-1] != len(logits):
            raise RuntimeError(f"the model gave {len(logits)} lines of logits for {stops[-1]} tokens")
        return [Lines(logits, start, stop) for start, stop in itertools.pairwise([0, *stops])]

    def _choose_ahead(self, flight: Flight, *, ahead: int) -> None:
        """Have the tokens of a step chosen on the device; where that fails, landing does it and finds who is to blame.

        Rows that were computed one by one are rare, and landing is sparing enough with them.
        """
        if self._device_sampler is None or not flight.computed:
            return
        logits = flight.computed[0][1].logits
        if any(lines.logits is not logits for _, lines in flight.computed):
            return
        try:
            turns = [turn for chunk, lines in flight.computed for turn in _turns_of(chunk, lines)]
            places = [turn.lines.stop - 1 for turn in turns]
            rows = [(turn.request.sampling, turn.output) for turn in turns]
            flight.awaited = self._device_sampler.choose(logits, places, rows, ahead)
            flight.turns = turns
        except Exception:
            logger.exception("The tokens of a step of %d could not be chosen on the device", len(flight.computed))

    def _watch(self, *, tried: bool, computed: bool) -> None:
        if computed:
            self._failed_steps = 0
        elif tried:
            self._failed_steps += 1
            if self._failed_steps == MAX_FAILED_STEPS:
                raise ExecutorFailedError(f"nothing could be computed in {MAX_FAILED_STEPS} steps in a row")

    def _commit(self, computed: Sequence[tuple[Chunk, Lines, bool]], result: StepResult) -> list[Turn]:
        """Count and publish what was computed, and tell whose next token can be chosen.

        Logits that are not finite say that some slot below them is not either, so what they were computed from is not
        published. That is why every chunk of a prompt is asked for logits, and not its last one alone.
        """
        turns: list[Turn] = []
        for chunk, lines, is_finite in computed:
            request = chunk.request
            if not is_finite:
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

    def _tell_prompt(self, chunk: Chunk, lines: Lines, result: StepResult) -> None:
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
        logger.error("Request %r of tenant %r failed", request.request_id, request.scope.tenant, exc_info=error)
        result.failed.setdefault(request, FAULT)


def _turns_of(chunk: Chunk, lines: Lines) -> Iterator[Turn]:
    """Yield the outputs that get a token once a chunk is computed; those that the prompt is carried for included."""
    request, sequence = chunk.request, chunk.sequence
    stop = sequence.num_computed + chunk.num_tokens
    if request.prefill_only or stop < len(sequence.token_ids):
        return
    if sequence is not request.carrier:
        yield Turn(request, sequence, lines)
        return
    for output in request.unfinished:
        # What it samples next can depend on its tokens, and the fork that brings them comes after the step.
        output.token_ids = output.token_ids or list(sequence.token_ids)
        if len(output.token_ids) == stop:
            yield Turn(request, output, lines)


def _finite_chunks(computed: Sequence[tuple[Chunk, Lines]], known: list[bool] | None) -> list[bool]:
    """Tell of each chunk whether its logits are finite; ``known`` are the lines' flags where the device told."""
    finite: list[bool] = []
    flags, looked_at = known, None
    for _, (logits, start, stop) in computed:
        if known is None and logits is not looked_at:
            flags, looked_at = finite_rows(logits), logits
        assert flags is not None
        finite.append(flags[start] if stop == start + 1 else all(flags[start:stop]))
    return finite


def _row(chunk: Chunk, ahead: int = 0) -> Row:
    """Make the row of a chunk; where ``ahead`` is 1, of the one token that is still to come."""
    request, sequence, count = chunk
    start, table = sequence.num_computed + ahead, sequence.table
    assert table is not None
    if ahead:
        return Row((0,), start, table.block_ids, request.scope, True)
    wants_all = request.sampling.prompt_logprobs is not None and wants_all_logits(request, start + count)
    token_ids = sequence.token_ids[start : start + count]
    return Row(token_ids, start, table.block_ids, request.scope, True, wants_all)


def _last_lines(turns: Sequence[Turn]) -> torch.Tensor:
    """Gather the logits ``[R, V]`` to choose from; not copied where they are all that the model gave."""
    logits, wanted = turns[0].lines.logits, [turn.lines.stop - 1 for turn in turns]
    if any(turn.lines.logits is not logits for turn in turns):
        return torch.stack([turn.lines.logits[line] for turn, line in zip(turns, wanted, strict=True)])
    return logits if wanted == list(range(len(logits))) else logits[wanted]
