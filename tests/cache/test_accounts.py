"""Floors, caps and what is left for others."""

import pytest

from prefixgate.cache.accounts import Accounts, TenantShare


def test_floors_and_pins_that_leave_nothing_are_refused_with_the_numbers() -> None:
    shares = {"a": TenantShare(floor=60), "b": TenantShare(floor=30)}
    with pytest.raises(ValueError, match=r"floors \(90 blocks\) and the pin limit \(10 blocks\).*pool \(100 blocks\)"):
        Accounts(100, shares, pin_limit=10)
    Accounts(101, shares, pin_limit=10)


@pytest.mark.parametrize(("floor", "cap"), [(-1, None), (5, 4), (0, 0)])
def test_a_share_that_contradicts_itself_is_refused_with_its_name(floor: int, cap: int | None) -> None:
    with pytest.raises(ValueError, match="tenant a"):
        Accounts(100, {"a": TenantShare(floor, cap)})


def test_the_ceiling_is_the_cap_or_what_pins_and_other_floors_leave() -> None:
    accounts = Accounts(100, {"a": TenantShare(floor=30), "b": TenantShare(floor=10, cap=20)}, pin_limit=5)
    assert accounts.ceiling("a") == 100 - 5 - 10
    assert accounts.ceiling("b") == 20
    assert accounts.ceiling("stranger") == 100 - 5 - 40


def test_room_leaves_what_is_missing_up_to_another_tenants_floor() -> None:
    accounts = Accounts(100, {"a": TenantShare(floor=30)})
    assert accounts.room(accounts.of("b"), free=100, cached=0) == 70
    assert accounts.room(accounts.of("a"), free=100, cached=0) == 100


def test_room_counts_what_others_cached_above_their_floor_only() -> None:
    accounts = Accounts(100, {"a": TenantShare(floor=30)})
    accounts.of("a").cached = 50
    assert accounts.room(accounts.of("b"), free=0, cached=50) == 20
    assert accounts.room(accounts.of("a"), free=0, cached=50) == 50


def test_room_counts_promises_of_everybody_against_everybody() -> None:
    accounts = Accounts(100, {})
    accounts.promise(accounts.of("a"), 40)
    assert accounts.room(accounts.of("b"), free=100, cached=0) == 60
    accounts.settle(accounts.of("a"), 40)
    assert accounts.room(accounts.of("b"), free=100, cached=0) == 100


def test_a_cap_counts_active_and_promised_blocks_since_cached_ones_can_be_evicted() -> None:
    accounts = Accounts(100, {"a": TenantShare(cap=20)})
    account = accounts.of("a")
    account.active, account.cached = 5, 15
    accounts.promise(account, 3)
    assert accounts.room(account, free=80, cached=15) == 12


def test_accounts_of_strangers_are_closed_when_empty() -> None:
    accounts = Accounts(100, {"a": TenantShare()})
    for name in ("a", "b"):
        accounts.forget_empty(accounts.of(name))
    assert [account.tenant for account in accounts] == ["a"]


def test_an_account_that_was_closed_and_opened_again_is_not_closed_by_its_old_holder() -> None:
    accounts = Accounts(100, {})
    old = accounts.of("a")
    accounts.forget_empty(old)
    new = accounts.of("a")
    accounts.forget_empty(old)
    assert accounts.of("a") is new
