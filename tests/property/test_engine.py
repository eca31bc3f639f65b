"""Whatever mix of calls the engine runs, each hears what it would have heard alone, once, and leaves nothing behind."""

import functools
from collections.abc import Callable

from grpc import StatusCode
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixgate.cache.accounts import TenantShare
from prefixgate.cache.admission import CacheMode
from prefixgate.worker.request import RefusedError, SamplingParams
from prefixgate.worker.sequence import FinishReason
from prefixgate.worker.witness_options import WitnessOptions
from tests.worker.driver import Call, Driver, solo, words

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65)
OPTIONS = WitnessOptions(eos_every=12, context=256)

prompts = st.builds(
    lambda length, seed, twist: tuple(words(length, seed) if twist is None else [*words(length - 1, seed), twist]),
    st.sampled_from(LENGTHS),
    st.integers(0, 2),
    st.none() | st.integers(33, 35),
)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 2, 5, 15, 16, 17, 33, 64]),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    top_k=st.sampled_from([None, 1, 20]),
    seed=st.integers(-1, 1),
    ignore_eos=st.booleans(),
)


@functools.cache
def alone(token_ids: tuple[int, ...], sampling: SamplingParams, n: int, tenant: str) -> dict[int, list[int]]:
    return solo(token_ids, sampling=sampling, n=n, tenant=tenant, options=OPTIONS)


class EngineMachine(RuleBasedStateMachine):
    """Submits, cancels, lets time pass and steps, in any order."""

    pin_limit = 0
    is_ahead = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.cut: set[Call] = set()
        """Calls that somebody may have ended early."""
        self.stopped: dict[Call, set[int]] = {}
        """Outputs that the gateway asked to stop."""
        self.refusals: list[StatusCode] = []

    @initialize(
        num_blocks=st.sampled_from([6, 7, 9, 12, 24]),
        floors=st.sampled_from(
            [{}, {}, {"acme": TenantShare(floor=3)}, {"bolt": TenantShare(2, 5), "acme": TenantShare(1)}]
        ),
        weights=st.sampled_from([{}, {"acme": 4.0}, {"bolt": 0.5}]),
        max_running=st.integers(1, 6),
        spare=st.sampled_from([1, 2, 9, 10, 15, 16, 40, 300]),
        max_waiting=st.sampled_from([0, 2, 100]),
    )
    def start(
        self,
        num_blocks: int,
        floors: dict[str, TenantShare],
        weights: dict[str, float],
        max_running: int,
        spare: int,
        max_waiting: int,
    ) -> None:
        self.driver = Driver(
            num_blocks,
            max_batch_tokens=max_running + spare,
            max_running=max_running,
            max_waiting=max_waiting,
            options=OPTIONS,
            shares=floors,
            pin_limit=self.pin_limit,
            weights=weights,
            is_ahead=self.is_ahead,
        )

    @rule(
        prompt=prompts,
        sampling=samplings,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        tenant=st.sampled_from(["acme", "acme", "bolt"]),
        deadline=st.sampled_from([None, None, None, 3.0]),
        time_limit=st.sampled_from([None, None, None, 2.0]),
        priority=st.sampled_from([0, 0, 0, 1]),
        mode=st.sampled_from([CacheMode.DEFAULT, CacheMode.DEFAULT, CacheMode.READ_ONLY, CacheMode.BYPASS]),
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        n: int,
        tenant: str,
        deadline: float | None = None,
        time_limit: float | None = None,
        priority: int = 0,
        mode: CacheMode = CacheMode.DEFAULT,
    ) -> None:
        try:
            call = self.driver.submit(
                prompt,
                sampling=sampling,
                n=n,
                tenant=tenant,
                deadline_seconds=deadline,
                time_limit_seconds=time_limit,
                priority=priority,
                cache_mode=mode,
            )
        except RefusedError as error:
            self.refusals.append(error.end.code)
            return
        self.calls.append(call)
        if deadline is not None:
            self.cut.add(call)

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), more=st.sampled_from([(), (33,), tuple(words(17, 9))]), sampling=samplings)
    def next_turn(self, data: st.DataObject, more: tuple[int, ...], sampling: SamplingParams) -> None:
        """Continue what a call said so far, be it ended or not, where the context and the pool allow."""
        call = data.draw(st.sampled_from(self.calls))
        prompt = (*call.request.token_ids, *call.outputs.get(0, ()), *more)
        if len(prompt) + sampling.max_tokens <= OPTIONS.context:
            self.submit(prompt, sampling, 1, call.request.scope.tenant)

    @rule(prompt=prompts, sampling=samplings, count=st.integers(2, 4), tenant=st.sampled_from(["acme", "bolt"]))
    def submit_several(self, prompt: tuple[int, ...], sampling: SamplingParams, count: int, tenant: str) -> None:
        """Equal calls and nearly equal ones at once: bursts, and too much for the pool."""
        for number in range(count):
            end = (33 + number,) if number % 2 else ()
            self.submit((*prompt, *end), sampling, 1, tenant)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.calls))
        self.cut.add(call)
        self.driver.engine.cancel(call.request)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def stop_output(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.calls))
        output = data.draw(st.integers(0, call.request.n - 1))
        self.stopped.setdefault(call, set()).add(output)
        self.driver.engine.cancel(call.request, output)

    @rule(steps=st.sampled_from([1, 2, 3, 20]), seconds=st.sampled_from([0.0, 1.0]))
    def run(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            before, progress = self.driver.engine.report(), self.progress()
            busy = self.driver.step()
            assert self.progress() > progress or not busy, f"a step without progress after {before}"
        self.driver.now += seconds

    def progress(self) -> int:
        """What only grows while the engine works."""
        heard = sum(len(token_ids) for call in self.calls for token_ids in call.outputs.values())
        return heard + sum(1 for call in self.calls if call.end) + len(self.driver.runner.steps)

    @invariant()
    def hears_what_it_would_hear_alone(self) -> None:
        for call in self.calls:
            request = call.request
            expected = alone(tuple(request.token_ids), request.sampling, request.n, request.scope.tenant)
            for index, token_ids in call.outputs.items():
                assert token_ids == expected[index][: len(token_ids)]
                is_whole = call.finished.get(index) in (FinishReason.STOP, FinishReason.LENGTH)
                if is_whole and index not in self.stopped.get(call, ()):
                    assert len(token_ids) == len(expected[index])

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        self.hears_what_it_would_hear_alone()
        for call in self.calls:
            assert call.end is not None
            usage = call.usage
            assert usage.completion_tokens == sum(map(len, call.outputs.values()))
            assert 0 <= usage.cached_tokens < usage.prompt_tokens
            if call.code is StatusCode.OK:
                assert call.finished.keys() == set(range(call.request.n))
                for index, reason in call.finished.items():
                    if reason is FinishReason.LENGTH:
                        assert len(call.outputs[index]) == call.request.sampling.max_tokens
                    elif reason is FinishReason.TIME_LIMIT:
                        assert call.request.time_limit_seconds is not None
            else:
                assert call in self.cut or call.code is StatusCode.RESOURCE_EXHAUSTED
        self.balances()
        self.driver.assert_idle()

    @property
    def num_received(self) -> int:
        return len(self.calls)

    def balances(self) -> None:
        """Every call that came has ended, in the counters too."""
        counts, report = self.driver.observations, self.driver.engine.report()
        assert counts.calls_received == sum(counts.calls_ended.values()) == self.num_received
        assert set(self.refusals) <= {StatusCode.INVALID_ARGUMENT, StatusCode.RESOURCE_EXHAUSTED}
        assert sum(counts.outputs_ended.values()) == sum(call.request.n for call in self.calls)
        assert sum(counts.generated_tokens.values()) == sum(call.usage.completion_tokens for call in self.calls)
        assert max(self.driver.runner.tokens_per_step, default=0) <= self.driver.limits.max_batch_tokens
        computed = sum(self.driver.runner.tokens_per_step)
        # What was launched for an output that ended in the step before counts for nobody.
        assert report.computed_tokens == computed or (self.is_ahead and report.computed_tokens < computed)
        assert counts.preemptions == sum(request.preemptions for request in self.driver.calls)
        first_tokens = sum(1 for call in self.calls if call.outputs)
        assert counts.first_token_seconds.cumulative()[0][-1][1] == first_tokens


def test_any_mix_of_calls_hears_what_each_would_hear_alone(scaled: Callable[[int], int]) -> None:
    run_state_machine_as_test(
        EngineMachine, settings=settings(max_examples=scaled(1000), stateful_step_count=40, deadline=None)
    )


class AheadEngineMachine(EngineMachine):
    """The same on a device that computes while the host goes on."""

    is_ahead = True


def test_the_same_holds_where_steps_are_launched_ahead(scaled: Callable[[int], int]) -> None:
    run_state_machine_as_test(
        AheadEngineMachine, settings=settings(max_examples=scaled(1000), stateful_step_count=40, deadline=None)
    )


@given(st.lists(st.tuples(prompts, st.integers(1, 20)), min_size=2, max_size=6), st.integers(3, 40))
@settings(max_examples=25, deadline=None)
def test_equal_prompts_in_any_order_agree_with_a_fresh_engine(
    turns: list[tuple[tuple[int, ...], int]], budget: int
) -> None:
    driver = Driver(24, max_batch_tokens=budget, max_running=2, options=OPTIONS)
    for prompt, max_tokens in turns + turns[::-1]:
        call = driver.ask(prompt, max_tokens)
        assert call.outputs == alone(prompt, SamplingParams(max_tokens), 1, "acme")
    driver.assert_idle()
