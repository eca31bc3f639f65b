"""Who computes what in a step, and who is admitted."""

from collections.abc import Mapping, Sequence

import pytest
from grpc import StatusCode

from prefixgate.cache.accounts import TenantShare
from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.limits import Limits
from prefixgate.worker.outbox import News
from prefixgate.worker.request import RefusedError, Request, RequestState, SamplingParams
from prefixgate.worker.scheduler import Scheduler
from prefixgate.worker.step_plan import StepPlan
from tests.worker.driver import words


class Silence:
    def deliver(self, step: int, news: Sequence[News]) -> None:
        """Hear nothing."""


def request(prompt_tokens: int, seed: int = 0, *, n: int = 1, max_tokens: int = 4) -> Request:
    return Request(words(prompt_tokens, seed), CacheScope("acme", "m"), SamplingParams(max_tokens), Silence(), n=n)


def scheduler(num_blocks: int = 64, *, batch: int = 64, running: int = 8) -> Scheduler:
    return Scheduler(PrefixCache(num_blocks, BlockHasher(bytes(16))), Limits(batch, running, 100))


def counts(plan: StepPlan) -> list[int]:
    return [chunk.num_tokens for chunk in plan.chunks]


def compute(plan: StepPlan) -> None:
    for chunk in plan.chunks:
        chunk.sequence.num_computed += chunk.num_tokens
        if not chunk.sequence.num_uncomputed:
            chunk.sequence.token_ids.append(1)


def test_calls_are_admitted_first_in_first_out_until_the_budget_is_gone() -> None:
    subject = scheduler(batch=64)
    calls = [request(40, seed) for seed in range(3)]
    for call in calls:
        subject.add(call)
    plan = subject.schedule()
    assert plan.admitted == calls[:2]
    assert counts(plan) == [40, 24]
    assert [call.state for call in calls] == [RequestState.RUNNING, RequestState.RUNNING, RequestState.WAITING]


def test_decodes_come_first_then_prompts_in_order_of_admission_then_new_calls() -> None:
    subject = scheduler(batch=32)
    first, second, third = request(16, 0), request(100, 1), request(50, 2)
    for call in (first, second):
        subject.add(call)
    compute(subject.schedule())
    subject.add(third)
    plan = subject.schedule()
    assert [(chunk.request, chunk.num_tokens) for chunk in plan.chunks] == [(first, 1), (second, 31)]
    compute(plan)
    compute(subject.schedule())
    plan = subject.schedule()
    assert [(chunk.request, chunk.num_tokens) for chunk in plan.chunks] == [(first, 1), (second, 22), (third, 9)]


def test_all_outputs_of_a_call_count_against_the_running_ones() -> None:
    subject = scheduler(running=4)
    calls = [request(16, 0, n=3), request(16, 1, n=2), request(16, 2)]
    for call in calls:
        subject.add(call)
    assert subject.schedule().admitted == calls[:1], "the third does not pass the second"
    assert subject.num_running_sequences == 3


def test_a_waiting_call_owns_no_blocks_wherever_its_admission_stops() -> None:
    for num_blocks in range(5, 14):
        cache = PrefixCache(num_blocks, BlockHasher(bytes(16)))
        subject = Scheduler(cache, Limits(512, 8, 100))
        calls = [request(64, seed, max_tokens=8) for seed in range(3)]
        for call in calls:
            subject.add(call)
        admitted = subject.schedule().admitted
        assert len(admitted) == min(num_blocks // 5, 3)
        assert sum(1 for call in calls for output in call.sequences if output.table) == len(admitted)
        assert sum(cache.pool.ref_counts) == 4 * len(admitted)
        cache.check_integrity()


def test_a_prompt_that_cannot_be_packed_ends_its_call_and_the_next_one_runs() -> None:
    subject = scheduler(num_blocks=4)
    impossible, possible = request(16), request(16, 1)
    impossible.token_ids = [-1] * 16
    subject.add(impossible)
    subject.add(possible)
    plan = subject.schedule()
    assert list(plan.failed) == [impossible]
    assert plan.admitted == [possible]


def test_an_idle_pool_that_does_not_admit_the_first_call_is_a_fault_and_nothing_to_wait_for() -> None:
    cache = PrefixCache(4, BlockHasher(bytes(16)))
    subject = Scheduler(cache, Limits(64, 8, 100))
    held = cache.admit(CacheScope("acme", "m"), words(16), max_new_tokens=1)  # held by nobody that the scheduler knows
    assert held is not None
    call = request(60)
    subject.add(call)
    failed = subject.schedule().failed
    assert "an idle pool has no room" in str(failed[call])
    assert len(failed) == 1


def test_what_was_planned_for_a_call_that_gives_way_is_taken_back_and_not_charged() -> None:
    subject = scheduler(num_blocks=5)
    elder, younger = request(16, 0, max_tokens=60), request(20, 1, max_tokens=60)
    for call in (elder, younger):
        subject.add(call)
    computed, plan = 0, StepPlan(0)
    while not plan.preempted:
        plan = subject.schedule()
        computed += sum(counts(plan))
        compute(plan)
    # The elder needs its third block, while the younger has room in its own and so comes first in the plan.
    assert len(elder.sequences[0].token_ids) == 32 + 2
    assert plan.preempted == [younger]
    assert [(chunk.request, chunk.num_tokens) for chunk in plan.chunks] == [(elder, 1)]
    assert plan.budget == subject.limits.max_batch_tokens - 1
    assert subject.fair.clock("acme") == computed


class TestPins:
    """A tenant's pins count against its cap, and can outlast any call."""

    def make(self, cap: int) -> tuple[PrefixCache, Scheduler]:
        cache = PrefixCache(32, BlockHasher(bytes(16)), shares={"acme": TenantShare(cap=cap)}, pin_limit=8)
        admission = cache.admit(CacheScope("acme", "m"), words(64), max_new_tokens=1)
        assert admission is not None
        cache.run_plan(lambda plan: None)
        cache.publish(admission.table, 64)
        cache.release(admission.table, 64)
        cache.pin(CacheScope("acme", "m"), words(64), expires_at=1e9)
        return cache, Scheduler(cache, Limits(64, 8, 100))

    def test_a_call_that_they_leave_no_room_for_ends_and_says_why(self) -> None:
        _, subject = self.make(cap=8)
        call = request(70, 5)
        subject.add(call)
        (error,) = subject.schedule().failed.values()
        assert isinstance(error, RefusedError)
        assert error.end.code is StatusCode.RESOURCE_EXHAUSTED
        assert "pins leave too little for this call of the 8 blocks" in error.end.message

    def test_it_waits_for_others_of_its_tenant_first(self) -> None:
        cache, subject = self.make(cap=8)
        running, call = request(40, 6), request(30, 5)
        subject.add(running)
        compute(subject.schedule())
        subject.add(call)
        assert not subject.schedule().failed
        subject.release(running.sequences[0], 0)
        subject.finish(running)
        subject.remove(running)
        assert subject.schedule().admitted == [call]
        cache.check_integrity()

    def test_one_that_runs_out_for_them_ends_too(self) -> None:
        _, subject = self.make(cap=8)
        call = request(30, 5, max_tokens=60)
        subject.add(call)
        failed: Mapping[Request, Exception] = {}
        while not failed:
            plan = subject.schedule()
            failed = plan.failed
            compute(plan)
        (error,) = failed.values()
        assert isinstance(error, RefusedError)
        assert not plan.chunks
        assert len(call.sequences[0].token_ids) == 4 * 16 + 1


@pytest.mark.parametrize("budget", [1, 7, 8])
def test_a_budget_that_could_starve_a_sequence_or_a_prompt_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=f"max_batch_tokens: {budget} must be more than max_running, 8"):
        Limits(budget, 8, 100)
    assert Limits(9, 8, 100).prompt_tokens == 2
