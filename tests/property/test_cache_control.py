"""Whatever is asked of the cache amid the calls: each call hears what it would have heard alone, and pins hold."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
from grpc import StatusCode
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from prefixgate.cache.hashing import CacheScope
from prefixgate.worker.cache_control import PinnedPrefix
from prefixgate.worker.request import RefusedError
from tests.property.test_engine import EngineMachine, prompts
from tests.worker.driver import MODEL, Call

tenants = st.sampled_from(["acme", "bolt"])


class ControlMachine(EngineMachine):
    """The engine's machine, with warms, pins, flushes and questions between its calls."""

    pin_limit = 2

    def __init__(self) -> None:
        super().__init__()
        self.warms: list[Call] = []
        self.pin_refusals: set[StatusCode] = set()
        self.pins: dict[int, tuple[CacheScope, tuple[int, ...], PinnedPrefix, float]] = {}
        """What was pinned, by id, and until when."""

    @rule(prompt=prompts, tenant=tenants, seconds=st.sampled_from([None, None, 2.0, 100.0]))
    def warm(self, prompt: tuple[int, ...], tenant: str, seconds: float | None) -> None:
        try:
            call = self.driver.submit(prompt, 1, tenant=tenant, prefill_only=True, pin_seconds=seconds)
        except RefusedError as error:
            self.refusals.append(error.end.code)
        else:
            self.warms.append(call)

    @precondition(lambda self: self.warms)
    @rule(data=st.data())
    def cancel_warm(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.warms))
        self.cut.add(call)
        self.driver.engine.cancel(call.request)

    @rule(prompt=prompts, tenant=tenants, seconds=st.sampled_from([1.0, 2.0, 100.0]))
    def pin(self, prompt: tuple[int, ...], tenant: str, seconds: float) -> None:
        scope = CacheScope(tenant, MODEL)
        try:
            pin = self.driver.control(lambda control: control.pin(scope, prompt, seconds), tenant)
        except RefusedError as error:
            self.pin_refusals.add(error.end.code)
        else:
            assert pin.expires_in_seconds >= seconds
            self.pins[pin.pin_id] = scope, prompt, pin, self.driver.now + pin.expires_in_seconds

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), tenant=tenants)
    def unpin(self, data: st.DataObject, tenant: str) -> None:
        pin_id = data.draw(st.sampled_from(sorted(self.pins)))
        scope, _, _, expires_at = self.pins[pin_id]
        is_there = scope.tenant == tenant and expires_at > self.driver.now
        with nullcontext() if is_there else pytest.raises(RefusedError, match="there is no such pin"):
            self.driver.control(lambda control: control.unpin(tenant, pin_id), tenant)
        if is_there:
            del self.pins[pin_id]

    @rule(tenant=tenants, salt=st.sampled_from([None, "", "s"]))
    def flush(self, tenant: str, salt: str | None) -> None:
        self.driver.control(lambda control: control.flush(tenant, salt), tenant)
        if salt != "s":
            self.pins = {pin_id: kept for pin_id, kept in self.pins.items() if kept[0].tenant != tenant}

    @rule(prompt=prompts, tenant=tenants)
    def explain(self, prompt: tuple[int, ...], tenant: str) -> None:
        scope = CacheScope(tenant, MODEL)
        found = self.driver.control(lambda control: control.explain(scope, prompt), tenant)
        sources = found.block_hit_tokens + found.partial_copy_tokens + found.claimed_tail_tokens
        assert found.missed_at == sources < len(prompt)

    @invariant()
    def what_is_pinned_is_found(self) -> None:
        self.pins = {pin_id: kept for pin_id, kept in self.pins.items() if kept[3] > self.driver.now}
        for scope, prompt, pin, _ in self.pins.values():
            assert len(self.driver.cache.match(scope, [*prompt, 0]).blocks) * 16 >= pin.tokens
        assert self.driver.cache.stats().pinned_blocks <= self.driver.cache.pins.limit

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        assert self.pin_refusals <= {StatusCode.FAILED_PRECONDITION, StatusCode.RESOURCE_EXHAUSTED}
        for call in self.warms:
            assert (call.outputs, call.finished) == ({}, {})
            if call.code is StatusCode.OK:
                assert call.usage.cached_tokens + call.request.prefilled_tokens == call.usage.prompt_tokens
                assert call.prefilled == sorted(set(call.prefilled))
            else:
                assert call in self.cut or call.code is StatusCode.RESOURCE_EXHAUSTED
        self.driver.now += 1000.0
        self.driver.step()
        super().teardown()

    @property
    def num_received(self) -> int:
        return len(self.calls) + len(self.warms)


def test_whatever_is_asked_of_the_cache_calls_hear_what_they_would_alone(scaled: Callable[[int], int]) -> None:
    run_state_machine_as_test(
        ControlMachine, settings=settings(max_examples=scaled(1000), stateful_step_count=40, deadline=None)
    )


class AheadControlMachine(ControlMachine):
    """The same on a device that computes while the host goes on."""

    is_ahead = True


def test_the_same_holds_where_steps_are_launched_ahead(scaled: Callable[[int], int]) -> None:
    run_state_machine_as_test(
        AheadControlMachine, settings=settings(max_examples=scaled(1000), stateful_step_count=40, deadline=None)
    )
