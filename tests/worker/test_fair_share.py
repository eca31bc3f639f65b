"""Clocks that run by weight, and tenants that come and go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.worker.fair_share import FairShare


def test_work_moves_a_clock_by_weight() -> None:
    fair = FairShare({"a": 2.0})
    for tenant in ("a", "b"):
        fair.enter(tenant)
    for tenant in ("a", "b"):
        fair.charge(tenant, 100)
    assert (fair.clock("a"), fair.clock("b")) == (50, 100)
    fair.charge("b", -60)
    assert fair.clock("b") == 40
    assert fair.part("a") == pytest.approx(2 / 3)
    assert fair.part("b") == pytest.approx(1 / 3)


def test_a_tenant_starts_where_the_one_furthest_behind_stands() -> None:
    fair = FairShare()
    fair.enter("a")
    fair.charge("a", 500)
    fair.enter("b")
    assert fair.clock("b") == 500
    fair.charge("b", 300)
    fair.charge("a", 100)
    fair.enter("c")
    assert fair.clock("c") == 600


def test_going_away_and_coming_back_neither_wins_nor_loses_anything() -> None:
    fair = FairShare()
    for tenant in ("a", "b"):
        fair.enter(tenant)
    fair.charge("a", 500)
    fair.leave("a")
    fair.enter("a")
    assert fair.clock("a") == 500
    fair.leave("a")
    fair.charge("b", 800)
    fair.enter("a")
    assert fair.clock("a") == 800


def test_a_tenant_is_active_while_it_has_calls() -> None:
    fair = FairShare()
    fair.enter("a")
    fair.enter("a")
    fair.enter("b")
    assert fair.part("a") == 0.5
    fair.leave("a")
    assert fair.num_active == 2
    fair.leave("b")
    assert (fair.num_active, fair.part("a")) == (1, 1.0)
    fair.leave("a")
    fair.enter("b")
    assert fair.clock("b") == 0, "with nobody there, all begin anew"


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 50))))
def test_parts_come_to_one_and_no_clock_runs_back(events: list[tuple[str, int]]) -> None:
    fair, active = FairShare({"a": 3.0, "b": 0.1}), set[str]()
    behind = 0.0
    for tenant, tokens in events:
        if tokens == 0 and tenant in active:
            active.remove(tenant)
            fair.leave(tenant)
        else:
            if tenant not in active:
                active.add(tenant)
                fair.enter(tenant)
            fair.charge(tenant, tokens)
        if active:
            assert sum(map(fair.part, active)) == pytest.approx(1)
            assert min(map(fair.clock, active)) >= behind
            behind = min(map(fair.clock, active))
        else:
            behind = 0.0
