"""What calls use of a quota, however they end. The clock stands still but where a test moves it."""

from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.config.limit_settings import NO_LIMITS, LimitSettings
from prefixgate.config.settings import TenantSettings
from prefixgate.gateway.errors import CallError, QuotaError
from prefixgate.gateway.quota import Charge, Quotas
from tests.gateway.test_token_bucket import Clock


def limits(**values: Any) -> LimitSettings:
    return replace(NO_LIMITS, **values)


def quotas(clock: Clock, shared: LimitSettings = NO_LIMITS, **tenants: LimitSettings) -> Quotas:
    return Quotas(shared, tenants, default_max_tokens=256, clock=clock)


def refused(act: Any, *arguments: Any) -> QuotaError:
    with pytest.raises(QuotaError) as refusal:
        act(*arguments)
    return refusal.value


def test_without_limits_everything_is_taken_and_told() -> None:
    quota = quotas(Clock(), acme=NO_LIMITS)
    charges = [quota.enter("acme") for _ in range(1000)]
    for charge in charges:
        charge.reserve(10**9, 10**9)
        charge.settle(3, 4)
        assert charge.close(by_client=False) == 7
        assert charge.close(by_client=False) == 0


def test_requests_per_minute_of_one_tenant_leave_another_alone() -> None:
    clock = Clock()
    quota = quotas(clock, acme=limits(requests_per_minute=2), zenith=NO_LIMITS)
    for _ in range(2):
        quota.enter("acme").close(by_client=False)
    error = refused(quota.enter, "acme")
    assert (error.code, error.limit, error.subject) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "requests_per_minute",
        "tenant acme",
    )
    assert error.retry_seconds == pytest.approx(30)
    assert "limits.requests_per_minute of tenant acme: more than 2 calls within a minute" in str(error)
    quota.enter("zenith").close(by_client=False)
    clock.now += 30
    quota.enter("acme").close(by_client=False)


def test_what_is_refused_uses_nothing_of_any_account() -> None:
    clock = Clock()
    quota = quotas(clock, limits(requests_per_minute=3), acme=limits(max_concurrent_calls=1), zenith=NO_LIMITS)
    held = quota.enter("acme")
    for _ in range(10):
        assert refused(quota.enter, "acme").limit == "max_concurrent_calls"
    quota.enter("zenith").close(by_client=False)
    held.close(by_client=False)
    quota.enter("acme").close(by_client=False)
    error = refused(quota.enter, "zenith")
    assert (error.limit, error.subject) == ("requests_per_minute", "all tenants")
    # The refusal by what all share took nothing of the tenant's own either.
    clock.now += 20
    quota.enter("acme").close(by_client=False)


def test_concurrent_calls_are_counted_until_they_close() -> None:
    quota = quotas(Clock(), acme=limits(max_concurrent_calls=2))
    first, second = quota.enter("acme"), quota.enter("acme")
    error = refused(quota.enter, "acme")
    assert "3 calls at the same time; must be at most 2" in str(error)
    assert error.retry_seconds > 0
    first.close(by_client=True)
    first.close(by_client=True)
    third = quota.enter("acme")
    refused(quota.enter, "acme")
    for charge in (second, third):
        charge.close(by_client=False)


MINUTE = 999


def tokens_left(quota: Quotas) -> int:
    """Work out what is left of a minute's tokens from when all of them would be there again."""
    probe = quota.enter("acme")
    try:
        probe.reserve(MINUTE, 0)
    except QuotaError as error:
        return round(MINUTE - error.retry_seconds * MINUTE / 60)
    finally:
        probe.close(by_client=False)
    return MINUTE


@pytest.mark.parametrize(
    ("delivered", "settled", "by_client", "used"),
    [
        (5, (30, 7), False, 37),  # as the worker counted it
        (5, (30, 7), True, 37),
        (5, None, False, 5),  # a failure of ours: what was delivered
        (0, None, False, 0),
        (5, None, True, 105),  # given up by the client: the prompt as well
        (0, None, True, 100),
        (0, (0, 0), False, 0),
    ],
)
def test_a_call_pays_for_what_it_used_however_it_ends(
    delivered: int, settled: tuple[int, int] | None, by_client: bool, used: int
) -> None:
    quota = quotas(Clock(), acme=limits(tokens_per_minute=MINUTE))
    charge = quota.enter("acme")
    charge.reserve(100, 50)
    assert tokens_left(quota) == MINUTE - 150
    charge.deliver(delivered)
    if settled is not None:
        charge.settle(*settled)
    assert charge.close(by_client=by_client) == used
    assert tokens_left(quota) == MINUTE - used


def test_a_second_attempt_reserves_nothing_more() -> None:
    quota = quotas(Clock(), acme=limits(tokens_per_minute=MINUTE))
    charge = quota.enter("acme")
    charge.reserve(100, 50)
    charge.reserve(100, 50)
    assert tokens_left(quota) == MINUTE - 150


def test_too_many_tokens_are_refused_with_value_bound_and_delay() -> None:
    clock = Clock()
    quota = quotas(clock, acme=limits(tokens_per_minute=600))
    first, second = quota.enter("acme"), quota.enter("acme")
    first.reserve(300, 200)
    error = refused(second.reserve, 150, 100)
    assert error.limit == "tokens_per_minute"
    assert "the call may use 250 tokens, more than is left of 600 per minute" in str(error)
    assert error.retry_seconds == pytest.approx(15)
    assert second.close(by_client=False) == 0
    clock.now += 15
    third = quota.enter("acme")
    third.reserve(150, 100)


def test_a_call_larger_than_a_minutes_worth_waits_for_a_full_bucket_and_pays_the_rest() -> None:
    clock = Clock()
    quota = quotas(clock, acme=limits(tokens_per_minute=60))
    charge = quota.enter("acme")
    charge.reserve(1000, 1000)
    charge.settle(90, 30)
    charge.close(by_client=False)
    probe = quota.enter("acme")
    assert refused(probe.reserve, 1, 0).retry_seconds == pytest.approx(61)
    clock.now += 61
    probe.reserve(1, 0)


def test_the_shared_bucket_holds_where_the_tenants_own_would_not() -> None:
    quota = quotas(Clock(), limits(tokens_per_minute=100), acme=limits(tokens_per_minute=1000), zenith=NO_LIMITS)
    charge = quota.enter("acme")
    charge.reserve(60, 0)
    other = quota.enter("zenith")
    error = refused(other.reserve, 60, 0)
    assert error.subject == "all tenants"
    assert error.retry_seconds == pytest.approx(12)
    charge.settle(10, 0)
    charge.close(by_client=False)
    other.reserve(60, 0)


def test_other_limits_hold_for_who_is_there_and_used_counts_on() -> None:
    clock = Clock()
    quota = quotas(clock, acme=limits(tokens_per_minute=100), gone=limits(max_concurrent_calls=1))
    charge, leaving = quota.enter("acme"), quota.enter("gone")
    charge.reserve(80, 0)
    quota.change(NO_LIMITS, {"acme": limits(tokens_per_minute=200, max_outputs=2), "new": NO_LIMITS})
    probe = quota.enter("acme")
    assert probe.limits.max_outputs == 2
    refused(probe.reserve, 121, 0)
    probe.reserve(120, 0)
    quota.enter("new").close(by_client=False)
    leaving.close(by_client=False)
    with pytest.raises(CallError) as unknown:
        quota.enter("gone")
    assert unknown.value.code is grpc.StatusCode.UNAUTHENTICATED
    quota.change(NO_LIMITS, {"acme": NO_LIMITS})
    free = quota.enter("acme")
    free.reserve(10**9, 0)
    assert charge.close(by_client=False) == 0


ENDS = st.sampled_from(["settled", "failed", "cancelled"])


@given(calls=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(0, 100), ENDS), max_size=40))
def test_when_all_have_closed_exactly_what_was_used_is_gone(calls: list[tuple[int, int, int, str]]) -> None:
    quota = quotas(Clock(), limits(tokens_per_minute=100_000), acme=limits(max_concurrent_calls=100))
    open_calls: list[tuple[Charge, int, str]] = []
    used = 0
    for prompt, outputs, delivered, end in calls:
        charge = quota.enter("acme")
        charge.reserve(prompt, outputs)
        charge.deliver(delivered)
        open_calls.append((charge, prompt + delivered, end))
        if end == "settled":
            charge.settle(prompt, delivered)
        if len(open_calls) > 3:
            used += _close(*open_calls.pop(0))
    used += sum(_close(*each) for each in open_calls)
    probe = quota.enter("acme")
    probe.reserve(100_000 - used, 0)
    last = quota.enter("acme")
    assert refused(last.reserve, 1, 0).limit == "tokens_per_minute"


def _close(charge: Charge, whole: int, end: str) -> int:
    used = charge.close(by_client=end == "cancelled")
    assert used == whole if end != "failed" else used <= whole
    return used


def test_without_a_word_from_the_operator_nobody_takes_all_calls_at_the_same_time() -> None:
    own = TenantSettings().limits.max_concurrent_calls
    shared = LimitSettings().max_concurrent_calls
    assert own is not None
    assert shared is not None
    names = [f"tenant-{number}" for number in range(shared // own + 1)]
    quota = quotas(Clock(), LimitSettings(), **{name: TenantSettings().limits for name in names})
    for name in names[:-1]:
        for _ in range(own):
            quota.enter(name)
        # Its own bound, while there is room for others.
        assert f"limits.max_concurrent_calls of tenant {name}" in str(refused(quota.enter, name))
    assert "limits.max_concurrent_calls of all tenants" in str(refused(quota.enter, names[-1]))
