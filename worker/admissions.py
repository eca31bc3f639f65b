"""From waiting to running: whether there is room for a call, whether others make room, or whether waiting pays."""

import math
import time
from collections.abc import Callable

from prefixgate.cache.admission import Admission, CacheMode
from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.cache.prompt import Prompt
from prefixgate.worker.fair_share import FairShare
from prefixgate.worker.followers import Followers
from prefixgate.worker.limits import Limits
from prefixgate.worker.request import Request, RequestState
from prefixgate.worker.sequence import Sequence
from prefixgate.worker.shares import Shares
from prefixgate.worker.step_plan import Resumption, StepPlan
from prefixgate.worker.waiting import WaitingCalls

Running = dict[Request, None]


class Admissions:
    """Admits waiting calls, one at a time: with the blocks of its prompt and the next block of each output, or not.

    A call for which there is no room holds up those behind it, of other tenants too: letting small ones pass would
    starve it for ever. Past it go only tenants that stay within their part, and only until they are ``max_lead``
    tokens of work ahead of it.
    """

    def __init__(
        self,
        cache: PrefixCache,
        limits: Limits,
        waiting: WaitingCalls,
        running: Running,
        fair: FairShare,
        shares: Shares,
        preempt: Callable[[StepPlan, Request], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting = waiting
        self._running = running
        self._fair = fair
        self._shares = shares
        self._preempt = preempt
        self._clock = clock
        self._followers = Followers(cache.block_size)
        self._max_lead = float(cache.num_blocks * cache.block_size)
        self._step = 0
        self._set_aside = 0
        """Calls that began to follow another in this step."""
        self._blocked_clock: float | None = None
        """Where the tenant stands whose call was the first in this step for which there is no room."""

    def begin_step(self) -> None:
        """Put calls back in line that have waited for a prefix long enough."""
        self._step += 1
        self._set_aside = 0
        self._blocked_clock = None
        for request in self._followers.take_ready(self._step):
            self._waiting.put_back(request)

    def forget(self, request: Request) -> None:
        """Take a call out of the queue, if it is there."""
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._followers:
            self._followers.remove(request)

    def admit(self, plan: StepPlan, request: Request) -> bool:
        """Decide about the first waiting call of its tenant. Returns False where it must wait, and those behind it.

        Otherwise it is running now, was set aside to wait for a prefix, or failed.
        """
        if request in plan.preempted:
            return False
        began = self._clock()
        sequence = request.next_carrier()
        try:
            prompt = self._prompt(request, sequence)
        except Exception as error:
            return self._fail(plan, request, error)
        return self._follows(request, prompt) or self._decide(plan, request, sequence, prompt, began)

    def _prompt(self, request: Request, sequence: Sequence) -> Prompt:
        prompt = request.prompt
        if prompt is None or prompt.num_tokens != len(sequence.token_ids):
            prompt = request.prompt = self._cache.prompt(request.scope, sequence.token_ids)
        return prompt

    def _fail(self, plan: StepPlan, request: Request, error: Exception) -> bool:
        self._waiting.remove(request)
        plan.failed[request] = error
        return True

    def _decide(self, plan: StepPlan, request: Request, sequence: Sequence, prompt: Prompt, began: float) -> bool:
        growth = self._growth(request, sequence)
        demand = self._cache.demand(prompt, growth, request.cache_mode)
        admission = None
        if self._has_room(plan, request, demand):
            admission = self._cache.admit(
                request.scope,
                sequence.token_ids,
                outputs=request.num_unfinished,
                max_new_tokens=_tokens_left(request, sequence),
                mode=request.cache_mode,
                retention=request.retention,
                prompt=prompt,
                growth=growth,
            )
        if admission is not None:
            if request.admitted_at is None:
                request.matching_at, request.admitted_at = began, self._clock()
            self._start(plan, request, sequence, admission)
            return True
        tenant = request.scope.tenant
        if not any(other.scope.tenant == tenant for other in self._running):
            pinned_out = self._shares.pinned_out(tenant, demand)
            if pinned_out is not None:
                return self._fail(plan, request, pinned_out)
        if not self._running and not plan.preempted:
            # A fault of ours. It would wait for ever, and everybody behind it.
            return self._fail(plan, request, RuntimeError("an idle pool has no room for a call that it can hold"))
        return False

    def _start(self, plan: StepPlan, request: Request, sequence: Sequence, admission: Admission) -> None:
        sequence.table = admission.table
        sequence.num_computed = admission.cached_tokens
        request.usage.copied_blocks += admission.copied_blocks
        if request.preemptions:
            plan.resumed.append(Resumption(request, len(sequence.token_ids), admission.cached_tokens))
        else:
            request.miss_reason = admission.miss_reason
            request.usage.block_hit_tokens = admission.block_hit_tokens
            request.usage.partial_copy_tokens = admission.partial_copy_tokens
            request.usage.claimed_tail_tokens = admission.claimed_tail_tokens
            plan.admitted.append(request)
        self._waiting.remove(request)
        self._running[request] = None
        request.state = RequestState.RUNNING

    # Waiting for a prefix

    def _follows(self, request: Request, prompt: Prompt) -> bool:
        """Set a call aside if another is computing what it misses first, so that it costs one prefill."""
        if (
            request.cache_mode is CacheMode.BYPASS
            or not request.may_follow
            or self._set_aside >= self._limits.max_running
        ):
            return False
        table = self._cache.leader(prompt)
        leader = None if table is None else self._owner(table)
        # One of lower priority may have to wait itself.
        if table is None or leader is None or leader.priority < request.priority:
            return False
        common = self._followers.common_blocks(prompt, table)
        tokens = common * self._cache.block_size - leader.live[0].num_computed
        self._waiting.set_aside(request)
        self._followers.add(request, table, common, until=self._step + self._steps_to_compute(request, tokens))
        self._set_aside += 1
        return True

    def _owner(self, table: BlockTable) -> Request | None:
        return next((request for request in self._running if any(s.table is table for s in request.live)), None)

    def _steps_to_compute(self, request: Request, tokens: int) -> int:
        """Steps in which a tenant that has its turns gets so many tokens of a prompt computed; see the docs."""
        turns = -(-tokens // self._limits.prompt_tokens)
        return math.ceil(turns / self._fair.part(request.scope.tenant)) + self._fair.num_active

    # Room

    def _growth(self, request: Request, sequence: Sequence) -> int:
        """Blocks beyond those of the carried tokens until each output has one more than it uses now."""
        size, carried = self._cache.block_size, len(sequence.token_ids)
        held, shared = -(-carried // size), carried // size
        own = (-(-max(carried, len(output.token_ids)) // size) + 1 - shared for output in request.unfinished)
        most = self._cache.blocks_needed(carried, _tokens_left(request, sequence), request.num_unfinished)
        return min(shared + sum(own), most) - held

    def _has_room(self, plan: StepPlan, request: Request, blocks: int) -> bool:
        """Whether a call can have so many blocks, after preempting others where its tenant's part allows that."""
        tenant, sequences = request.scope.tenant, request.num_unfinished
        is_modest = self._shares.may_add(tenant, blocks=blocks, sequences=sequences)
        if self._blocked_clock is not None:
            lead = self._fair.clock(tenant) - self._blocked_clock
            if not is_modest or lead > self._max_lead:
                return False
        if self._fits(tenant, blocks, sequences):
            return True
        if is_modest and self._make_room(plan, request, blocks, sequences):
            return True
        if self._blocked_clock is None and not self._shares.is_at_cap(tenant, blocks):
            self._blocked_clock = self._fair.clock(tenant)
        return False

    def _fits(self, tenant: str, blocks: int, sequences: int) -> bool:
        return self._lacking(sequences) <= 0 and blocks <= self._cache.room(tenant)

    def _lacking(self, sequences: int) -> int:
        return sum(request.num_unfinished for request in self._running) + sequences - self._limits.max_running

    def _make_room(self, plan: StepPlan, request: Request, blocks: int, sequences: int) -> bool:
        """Preempt calls of tenants that have more than their part, if that is enough."""
        tenant = request.scope.tenant
        if not self._shares.can_free(
            request, blocks=blocks - self._cache.room(tenant), sequences=self._lacking(sequences)
        ):
            return False
        while not self._fits(tenant, blocks, sequences):
            victim = self._shares.makes_way(request, for_blocks=blocks > self._cache.room(tenant))
            if victim is None:
                return False
            self._preempt(plan, victim)
        return True


def _tokens_left(request: Request, sequence: Sequence) -> int:
    """Tokens that can still be sampled behind the carried ones."""
    return request.sampling.max_tokens - sequence.num_output
