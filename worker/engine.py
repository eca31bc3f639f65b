"""The engine: one step after another, from waiting calls to ended ones.

``submit``, ``cancel``, ``report`` and ``questions.ask`` may be called from any thread. All else runs on one, the only
thread that touches the cache, the scheduler and the model. An exception that leaves ``step`` means that the engine
cannot go on.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import ParamSpec

from grpc import StatusCode

from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.cache_control import CacheControl
from prefixgate.worker.cache_feed import CacheFeed
from prefixgate.worker.deadlines import Deadlines
from prefixgate.worker.door import Door
from prefixgate.worker.executor import FAULT, Executor
from prefixgate.worker.flight import Flight
from prefixgate.worker.inbox import Cancellation, Inbox, InboxClosedError
from prefixgate.worker.limits import Limits
from prefixgate.worker.lookahead import Lookahead
from prefixgate.worker.model_runner import ModelRunner
from prefixgate.worker.observations import OTHER_TENANT, Observations
from prefixgate.worker.outbox import Outbox
from prefixgate.worker.questions import Questions
from prefixgate.worker.report import EngineReport, TenantBlocks
from prefixgate.worker.request import End, RefusedError, Request, RequestState
from prefixgate.worker.sampler import Choice
from prefixgate.worker.scheduler import Scheduler
from prefixgate.worker.sequence import FinishReason, Sequence
from prefixgate.worker.step_plan import Chunk
from prefixgate.worker.survey import Surveyor
from prefixgate.worker.waiting import Line

logger = logging.getLogger(__name__)

P = ParamSpec("P")

NO_LINE = Line(0, 0.0)
RECEIVER_GONE = End(StatusCode.CANCELLED, "whoever asked for it can no longer be told")


class Engine:
    """Runs the calls of all gateways on one model and one pool."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: PrefixCache,
        limits: Limits,
        observations: Observations,
        *,
        weights: Mapping[str, float] | None = None,
        poison: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inbox = Inbox()
        self._cache = cache
        self._limits = limits
        self._observations = observations
        self._clock = clock
        self._door = Door(cache, limits, clock)
        self._eos_ids = frozenset(runner.spec.eos_ids)
        self._scheduler = Scheduler(cache, limits, weights, clock)
        self._control = CacheControl(cache, self._scheduler, clock)
        self.questions = Questions(self.inbox, self._control, clock)
        self._executor = Executor(runner, cache, poison=poison)
        self._lookahead = Lookahead(self._executor, cache, self._scheduler, limits)
        self._flight: Flight | None = None
        """The step that was launched behind the last one that landed."""
        self._deadlines = Deadlines()
        self._time_limits = Deadlines()
        self._outbox = Outbox()
        self.cache_feed = CacheFeed(cache)
        self.surveyor = Surveyor(cache, self._scheduler, observations.tenants)
        self._steps = 0
        self._computed_tokens = 0
        self._integrity_checks = 0
        self._integrity_violations = 0
        self._metrics_errors = 0
        self._oldest_received_at: float | None = None
        self._lines: Mapping[str, Line] = {}
        self._report = self._take_report()

    # From any thread

    def submit(self, request: Request) -> None:
        """Queue a call, whose sink hears of it from now on until its end, which comes once.

        Raises RefusedError for a call that can never run here, finds too many before it, or comes too late.
        """
        self._door.check_size(request)
        tenant = request.scope.tenant
        self._door.check_line(self._lines.get(tenant, NO_LINE), self.inbox.num_submits_of(tenant))
        request.received_at = self._clock()
        try:
            self.inbox.submit(request)
        except InboxClosedError:
            raise RefusedError(StatusCode.UNAVAILABLE, "the worker is shutting down; try again later") from None

    def call_refused(self, end: End) -> None:
        """Count a call that ended before it was queued, whoever refused it."""
        self._observe(self._observations.call_refused, end)

    def cancel(self, request: Request, output: int | None = None) -> None:
        """End a call, or one output of it, at the next step; of no effect on what has ended."""
        self.inbox.cancel(Cancellation(request, output))

    def tenant_blocks(self) -> dict[str, TenantBlocks]:
        """What each tenant label holds of the pool. Read from the live accounts, so it can be amid a step."""
        accounts = self._cache.accounts
        blocks = {tenant: TenantBlocks.of(accounts.find(tenant)) for tenant in self._observations.tenants}
        stats = self._cache.stats()
        blocks[OTHER_TENANT] = TenantBlocks(
            active=max(0, stats.active_blocks - sum(tenant.active for tenant in blocks.values())),
            cached=max(0, stats.cached_blocks - sum(tenant.cached for tenant in blocks.values())),
        )
        return blocks

    def report(self) -> EngineReport:
        """How things stood when the model last began or ended a step, with the calls since counted as waiting.

        What it tells of changes in ``step`` alone, so no reader sees it half changed, and no reader waits for a step.
        """
        report, oldest, fresh = self._report, self._oldest_received_at, self.inbox.num_submits
        age = 0.0 if oldest is None else self._clock() - oldest
        return report._replace(waiting_calls=report.waiting_calls + fresh, oldest_call_seconds=age)

    # On the engine's thread

    def step(self) -> bool:
        """Run one step. Returns whether a call is left to work on."""
        self._steps += 1
        flight = self._flight or self._launch()
        # Before it lands, so that the device has the next step when it is done with this one.
        self._flight = None if self._is_due() else self._lookahead.launch_behind(flight)
        self._land(flight)
        self._report = self._take_report()
        for request in self._outbox.deliver(self._steps):
            self._end(request, RECEIVER_GONE)
            self._report = self._take_report()
        self.cache_feed.publish()
        if self._flight is not None and not self._flight.is_wanted:
            # All that it computes is for nobody, and who waits need not wait for that: the device goes by the order of
            # launches.
            self._flight = None
        return bool(self._flight or self._scheduler.waiting or self._scheduler.running or self.inbox.num_submits)

    def seconds_to_expiry(self) -> float | None:
        """Time until a pin may expire, for which a step is due even without calls; None without pins."""
        expiry = self._cache.pins.next_expiry
        return None if expiry is None else max(0.0, expiry - self._clock())

    def end_all(self, end: End) -> None:
        """End every call, those that no step has seen yet included."""
        if self._flight is not None:
            self._land(self._flight)
            self._flight = None
        self._follow_commands()
        for request in self._scheduler.calls():
            self._end(request, end)
        self._report = self._take_report()
        self._outbox.deliver(self._steps)

    def abandon_all(self, end: End) -> None:
        """Tell every call its end after ``step`` has raised, and touch nothing else.

        What is wrong can be wrong anywhere, so no block is given back: nothing computes here any more.
        """
        unseen = self.inbox.take().submits
        for _ in unseen:
            self._observe(self._observations.call_received)
        for request in [*self._scheduler.calls(), *unseen]:
            if request.state is not RequestState.ENDED:
                self._conclude(request, end)
        self._outbox.deliver(self._steps)

    def check_integrity(self) -> None:
        """Check the cache's invariants. A violation is logged and counted: ending live streams would not mend it."""
        self._integrity_checks += 1
        try:
            self._cache.check_integrity()
        except Exception:
            logger.exception("The cache's invariants do not hold")
            self._integrity_violations += 1
        self._report = self._take_report()

    # What a step does

    def _launch(self) -> Flight:
        """Do all that is to be done between two steps, and begin the next one."""
        self._follow_commands()
        self._end_overdue()
        # Behind what ended, so that who heard of a call's end and asks finds what it left.
        self.questions.answer()
        chunks = self._schedule()
        if chunks:
            # The model can take long, and a call that it runs for the first time would be seen nowhere meanwhile.
            self._report = self._take_report()
        # Also without any: what was planned for a call that failed since holds blocks until it is done.
        return self._executor.launch(chunks)

    def _is_due(self) -> bool:
        """Whether somebody wants something of the engine that is done between two steps."""
        now = self._clock()
        is_overdue = self._time_limits.is_overdue(now) or self._deadlines.is_overdue(now)
        return self.inbox.is_wanted or is_overdue or self.seconds_to_expiry() == 0.0

    def _follow_commands(self) -> None:
        commands = self.inbox.take()
        for request in commands.submits:
            self._scheduler.add(request)
            self._deadlines.add(request, request.deadline_seconds)
            self._time_limits.add(request, request.time_limit_seconds)
            self._observe(self._observations.call_received)
        for request, output in commands.cancels:
            if request.state is RequestState.ENDED:
                continue
            if output is None:
                self._end(request, End(StatusCode.CANCELLED, "the call was cancelled"))
            elif output < request.n and request.sequences[output].finish_reason is None:
                self._finish(request, request.sequences[output], FinishReason.STOP)

    def _end_overdue(self) -> None:
        now = self._clock()
        self._cache.expire(now)
        # First, as one step can bring both: an answer that is there is worth more than a failure.
        for request in self._time_limits.take_overdue(now):
            if request.state is not RequestState.ENDED:
                # Also while it waits: its outputs are empty then.
                for output in request.unfinished:
                    self._finish(request, output, FinishReason.TIME_LIMIT)
        for request in self._deadlines.take_overdue(now):
            self._end(request, End(StatusCode.DEADLINE_EXCEEDED, "the call's time ran out"))

    def _schedule(self) -> list[Chunk]:
        plan = self._scheduler.schedule()
        for request, error in plan.failed.items():
            if isinstance(error, RefusedError):
                self._end(request, error.end)
            else:
                logger.error("Request %r could not be scheduled", request.request_id, exc_info=error)
                self._end(request, FAULT)
        now = self._clock()
        for _ in plan.preempted:
            self._observe(self._observations.call_preempted)
        for resumption in plan.resumed:
            self._observe(self._observations.call_resumed, resumption.carried_tokens, resumption.cached_tokens)
        for request in plan.admitted:
            request.usage.queue_seconds = now - request.received_at
            self._observe(self._observations.call_admitted, request)
        waiting = self._scheduler.waiting
        while waiting.num_new > self._limits.max_waiting:
            request = waiting.last_of_largest(self._scheduler.fair.weight)
            self._end(request, self._door.too_many(waiting.line(request.scope.tenant)))
        return plan.chunks

    def _land(self, flight: Flight) -> None:
        result = self._executor.land(flight)
        self._computed_tokens += result.computed_tokens
        now = self._clock()
        for request, logprobs in result.prompt_logprobs:
            self._outbox.of(request).prompt_logprobs += logprobs
        for chunk in result.prefilled:
            if chunk.request not in result.failed:
                self._advance_prefill(chunk.request, chunk.sequence)
        gaps = [
            (turn.request.scope.tenant, self._append(turn.request, turn.output, choice, now))
            for turn, choice in result.sampled
            if turn.request not in result.failed
        ]
        if gaps:
            self._observe(self._observations.tokens, gaps)
        for request, end in result.failed.items():
            self._end(request, end)

    def _advance_prefill(self, request: Request, output: Sequence) -> None:
        """Tell how far a prompt is that nothing is sampled behind, and end its call once it is computed."""
        # After a preemption, what is found again of what was computed before counts as computed.
        computed = output.num_computed - request.usage.cached_tokens
        if computed > request.prefilled_tokens:
            request.prefilled_tokens = computed
            self._outbox.of(request).has_prefilled = True
        if not output.num_uncomputed:
            self._scheduler.finish(request)
            self._end(request, End(StatusCode.OK))

    def _append(self, request: Request, output: Sequence, choice: Choice, now: float) -> float | None:
        """Take a sampled token over into its output. Its slot is written when it is computed, in the next step.

        Returns the time since the output's last token, where it has one.
        """
        token_id, logprob = choice
        output.token_ids.append(token_id)
        output.num_output += 1
        request.usage.completion_tokens += 1
        news = self._outbox.of(request)
        news.token_ids.setdefault(output.index, []).append(token_id)
        if logprob is not None:
            news.logprobs.setdefault(output.index, []).append(logprob)
        if request.first_token_at is None:
            request.first_token_at = now
            request.usage.first_token_seconds = now - request.received_at
            self._observe(self._observations.first_token, request)
        gap = None if output.last_token_at is None else now - output.last_token_at
        output.last_token_at = now
        sampling = request.sampling
        if token_id in sampling.stop_ids or (token_id in self._eos_ids and not sampling.ignore_eos):
            self._finish(request, output, FinishReason.STOP)
        elif output.num_output >= sampling.max_tokens:
            self._finish(request, output, FinishReason.LENGTH)
        return gap

    # Ends

    def _finish(self, request: Request, output: Sequence, reason: FinishReason) -> None:
        """End one output well, and its call with the last of them."""
        output.finish_reason = reason
        self._outbox.of(request).finished[output.index] = reason
        self._observe(self._observations.output_ended, reason.value)
        self._scheduler.finish(request)
        self._scheduler.release(output, output.num_computed)
        if not request.num_unfinished:
            self._end(request, End(StatusCode.OK))

    def _end(self, request: Request, end: End) -> None:
        """End a call: the one exit of all, whatever ended it. A second end does nothing."""
        if request.state is RequestState.ENDED:
            return
        self._conclude(request, end)
        self._scheduler.remove(request)
        failed = end.code is StatusCode.INTERNAL
        for sequence in [*request.sequences, *([request.carrier] if request.carrier else [])]:
            # Of a call that failed no more is kept than what was proven and published before.
            self._scheduler.release(sequence, 0 if failed else sequence.num_computed)
        if end.code is StatusCode.OK and request.pin_seconds is not None:
            request.usage.pinned_tokens = self._control.keep(request.scope, request.token_ids, request.pin_seconds)

    def _conclude(self, request: Request, end: End) -> None:
        request.state = RequestState.ENDED
        request.ended_at = self._clock()
        for _ in range(0 if request.prefill_only else request.num_unfinished):
            self._observe(self._observations.output_ended, "error" if end.code is StatusCode.INTERNAL else "abort")
        self._outbox.of(request).end = end
        self._observe(self._observations.call_ended, end)

    # Figures

    def _observe(self, record: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Record an observation. One that fails is counted and dropped: it must not end a stream."""
        try:
            record(*args, **kwargs)
        except Exception:
            if not self._metrics_errors:
                logger.exception("An observation failed; further ones are only counted")
            self._metrics_errors += 1

    def _take_report(self) -> EngineReport:
        cache, scheduler = self._cache.stats(), self._scheduler
        self._lines = scheduler.waiting.lines()
        oldest = scheduler.oldest
        self._oldest_received_at = oldest.received_at if oldest else None
        return EngineReport(
            total_blocks=cache.total_blocks,
            free_blocks=cache.free_blocks,
            active_blocks=cache.active_blocks,
            cached_blocks=cache.cached_blocks,
            running_calls=len(scheduler.running),
            running_sequences=scheduler.num_running_sequences,
            waiting_calls=len(scheduler.waiting),
            waiting_sequences=scheduler.waiting.num_sequences,
            oldest_call_seconds=0.0,  # filled in when it is read
            steps=self._steps,
            computed_tokens=self._computed_tokens,
            copied_blocks=cache.copies_total,
            evicted_blocks=cache.evictions_total,
            evicted_idle_seconds=cache.evicted_idle_seconds_total,
            pins=len(self._cache.pins),
            pinned_blocks=cache.pinned_blocks,
            pin_limit_blocks=self._cache.pins.limit,
            hash_collisions=cache.collisions_total,
            integrity_checks=self._integrity_checks,
            integrity_violations=self._integrity_violations,
            metrics_errors=self._metrics_errors,
        )
