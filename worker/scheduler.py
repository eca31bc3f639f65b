"""Who computes what in a step, and who gives way.

One budget of tokens per step. Sequences that decode come first, since each of them holds a stream open. What is left
goes to prompts in chunks and to waiting calls, in turns: each to the tenant that was served least for its weight, and
within a tenant by priority, then age. ``docs/scheduling.md`` tells the rules and the bounds that follow from them.
"""

import heapq
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

from prefixgate.cache.block_pool import NoFreeBlocksError
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.admissions import Admissions
from prefixgate.worker.fair_share import FairShare
from prefixgate.worker.limits import Limits
from prefixgate.worker.request import Request, RequestState
from prefixgate.worker.sequence import Sequence
from prefixgate.worker.shares import Shares
from prefixgate.worker.step_plan import Chunk, StepPlan
from prefixgate.worker.waiting import WaitingCalls

Begun = dict[str, list[tuple[Request, Sequence]]]
"""Sequences with more than one token to compute, by tenant, next one last."""


class Scheduler:
    """The waiting and the running calls. Runs on the engine's thread."""

    def __init__(
        self,
        cache: PrefixCache,
        limits: Limits,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.waiting = WaitingCalls()
        self.running: dict[Request, None] = {}
        """In order of admission."""
        self.fair = FairShare(weights)
        self._cache = cache
        self._calls: OrderedDict[Request, None] = OrderedDict()
        self._shares = Shares(cache, self.fair, self._calls, self.running, limits.max_running)
        self._admissions = Admissions(
            cache, limits, self.waiting, self.running, self.fair, self._shares, self._preempt, clock
        )
        self._arrivals = itertools.count()

    @property
    def num_running_sequences(self) -> int:
        """Outputs admitted and not finished, those that wait for their prompt included."""
        return sum(request.num_unfinished for request in self.running)

    @property
    def oldest(self) -> Request | None:
        """The live call that came first."""
        return next(iter(self._calls), None)

    def calls(self) -> list[Request]:
        """All live calls, in order of arrival."""
        return list(self._calls)

    def add(self, request: Request) -> None:
        """Queue a call."""
        request.rank = (-request.priority, next(self._arrivals))
        self._calls[request] = None
        self.fair.enter(request.scope.tenant)
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Forget a call that ended, wherever it stood, and let go of all that it holds."""
        if request not in self._calls:
            return
        del self._calls[request]
        self.running.pop(request, None)
        self._admissions.forget(request)
        self.fair.leave(request.scope.tenant)

    def finish(self, request: Request) -> None:
        """Note that one of a call's outputs has ended."""
        request.num_unfinished -= 1
        if request in self.waiting:
            self.waiting.output_ended()

    def release(self, sequence: Sequence, num_written: int) -> None:
        """Give back what a sequence holds."""
        table, sequence.table = sequence.table, None
        if table is not None:
            self._cache.release(table, num_written)

    def schedule(self) -> StepPlan:
        """Choose the chunks of the next step, admit what fits, and preempt what must give way.

        With a call waiting and none running, the plan holds an admitted or a failed one: there is no step without
        progress.
        """
        plan = StepPlan(self.limits.max_batch_tokens)
        self._admissions.begin_step()
        begun = self._schedule_decodes(plan)
        self._schedule_prompts(plan, begun)
        return plan

    def _schedule_decodes(self, plan: StepPlan) -> Begun:
        """Give each sequence that has one token to compute its token. Returns those that have more."""
        begun: Begun = {}
        short: list[Chunk] = []
        tenants: list[str] = []
        for request in self.running:
            for sequence in request.live:
                computed = sequence.num_computed
                if len(sequence.token_ids) - computed > 1:
                    begun.setdefault(request.scope.tenant, []).append((request, sequence))
                elif computed < sequence.num_writable:
                    plan.chunks.append(Chunk(request, sequence, 1))
                    tenants.append(request.scope.tenant)
                else:
                    short.append(Chunk(request, sequence, 1))
        plan.budget -= len(tenants)
        for tenant, count in Counter(tenants).items():
            self.fair.charge(tenant, count)
        # Each in its sixteenth token only. One that finds no block can take back what was planned for another above.
        for request, sequence, count in short:
            if _is_in(plan, request, sequence):
                self._add_chunk(plan, request, sequence, count)
        return begun

    def _schedule_prompts(self, plan: StepPlan, begun: Begun) -> None:
        """Give the rest of the budget away in turns."""
        for sequences in begun.values():
            sequences.sort(key=lambda item: item[0].rank, reverse=True)
        turns = [(self.fair.clock(tenant), tenant) for tenant in {*begun, *self.waiting.tenants()}]
        heapq.heapify(turns)
        while turns and plan.budget > 0:
            tenant = heapq.heappop(turns)[1]
            if self._take_turn(plan, tenant, begun.get(tenant, [])):
                heapq.heappush(turns, (self.fair.clock(tenant), tenant))

    def _take_turn(self, plan: StepPlan, tenant: str, begun: list[tuple[Request, Sequence]]) -> bool:
        """Give the tenant's next prompt a chunk, or admit its next call. Returns whether it had either."""
        while begun and not _is_in(plan, *begun[-1]):
            begun.pop()
        first = self.waiting.first(tenant)
        if first is not None and (not begun or first.rank < begun[-1][0].rank) and self._admissions.admit(plan, first):
            if first.state is RequestState.RUNNING:
                (sequence,) = first.live
                self._add_prompt(plan, first, sequence)
            return True
        if begun:
            self._add_prompt(plan, *begun.pop())
            return True
        return False

    def _add_prompt(self, plan: StepPlan, request: Request, sequence: Sequence) -> None:
        """Give a prompt as much as the step has left for it; nothing where that is log-probabilities of others."""
        count = min(sequence.num_uncomputed, plan.budget)
        if request.sampling.prompt_logprobs is not None:
            count = min(count, plan.logit_lines)
            plan.logit_lines -= count
        if count:
            self._add_chunk(plan, request, sequence, count)

    def _add_chunk(self, plan: StepPlan, request: Request, sequence: Sequence, count: int) -> None:
        is_writable = sequence.num_computed + count <= sequence.num_writable
        if is_writable or self._make_writable(plan, request, sequence, count):
            plan.add(Chunk(request, sequence, count))
            self.fair.charge(request.scope.tenant, count)

    def _make_writable(self, plan: StepPlan, request: Request, sequence: Sequence, count: int) -> bool:
        """Get the slots of a sequence's next tokens, from other calls if need be. Returns whether it has them now."""
        table, start = sequence.table, sequence.num_computed
        assert table is not None
        while True:
            try:
                request.usage.copied_blocks += self._cache.writable(table, start, start + count)
            except NoFreeBlocksError as error:
                victim = self._shares.gives_way(request)
                if victim is None:
                    self._fail(plan, request, self._shares.pinned_out(request.scope.tenant, 1) or error)
                    return False
                self._preempt(plan, victim)
                if victim is request:
                    return False
            else:
                sequence.num_writable = len(table.block_ids) * self._cache.block_size
                return True

    def _fail(self, plan: StepPlan, request: Request, error: Exception) -> None:
        """Leave the ending to the engine, with nothing of the call in the step."""
        plan.failed[request] = error
        self.fair.charge(request.scope.tenant, -plan.drop(request))

    def _preempt(self, plan: StepPlan, request: Request) -> None:
        """Take everything back from a running call and let it wait, in its place in line.

        It keeps its tokens, and its full blocks stay cached for when it comes back.
        """
        for sequence in request.live:
            self.release(sequence, sequence.num_computed)
            sequence.num_computed = sequence.num_writable = 0
        request.carrier = request.prompt = None
        request.state = RequestState.WAITING
        request.preemptions += 1
        del self.running[request]
        self.waiting.add(request)
        plan.preempted.append(request)
        self.fair.charge(request.scope.tenant, -plan.drop(request))


def _is_in(plan: StepPlan, request: Request, sequence: Sequence) -> bool:
    """Whether a sequence can still be given a chunk: others can make its call give way, and one of its outputs fail."""
    return sequence.table is not None and request not in plan.failed
