"""Who belongs to the fleet: the workers that are named, and those that a name stands for at the moment."""

import asyncio
from collections.abc import Sequence

import pytest

from prefixgate.config.address import Address
from prefixgate.gateway.membership import Membership, look_up
from tests.gateway.rig import run


class Names:
    """A DNS server that answers what the test says, one answer for each look-up."""

    def __init__(self, *answers: Sequence[str] | OSError | UnicodeError) -> None:
        self._answers = list(answers)
        self.asked: list[Address] = []

    async def __call__(self, name: Address) -> Sequence[str]:
        self.asked.append(name)
        answer = self._answers.pop(0) if self._answers else ()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def first(membership: Membership, count: int) -> list[set[str]]:
    """Take so many states of a membership."""
    states: list[set[str]] = []
    async for addresses in membership.changes():
        states.append(set(addresses))
        if len(states) == count:
            break
    return states


def test_named_workers_are_there_from_the_beginning_and_never_change() -> None:
    async def test() -> list[set[str]]:
        return [set(addresses) async for addresses in Membership(["a:1", "unix:/b"]).changes()]

    assert run(test()) == [{"a:1", "unix:/b"}]


def test_a_name_is_looked_up_again_and_only_changes_are_told() -> None:
    names = Names(["10.0.0.1:80", "10.0.0.2:80"], ["10.0.0.2:80", "10.0.0.1:80"], ["10.0.0.2:80"], [])
    membership = Membership(["a:1", "dns:workers.svc:80"], lookup=names, seconds=0.0)
    assert run(first(membership, 4)) == [
        {"a:1"},
        {"a:1", "10.0.0.1:80", "10.0.0.2:80"},
        {"a:1", "10.0.0.2:80"},
        {"a:1"},
    ]
    assert set(names.asked) == {Address("workers.svc", 80)}


@pytest.mark.parametrize("error", [OSError("no server answers"), UnicodeError("label too long")])
def test_a_look_up_that_fails_takes_nobody_away(
    error: OSError | UnicodeError, caplog: pytest.LogCaptureFixture
) -> None:
    names = Names(["10.0.0.1:80"], error, ["10.0.0.2:80"])
    states = run(first(Membership(["dns:workers.svc:80"], lookup=names, seconds=0.0), 3))
    assert states == [set(), {"10.0.0.1:80"}, {"10.0.0.2:80"}]
    assert str(error) in caplog.text


def test_a_look_up_that_goes_on_failing_is_logged_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    down, gone = OSError("no server answers"), OSError("there is no such name")
    names = Names(down, down, down, gone, gone, ["10.0.0.1:80"], down, ["10.0.0.2:80"])
    run(first(Membership(["dns:workers.svc:80"], lookup=names, seconds=0.0), 3))
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [down, gone, down]


def test_the_systems_resolver_is_asked() -> None:
    assert "127.0.0.1:80" in asyncio.run(_resolved(Address("127.0.0.1", 80)))
    assert asyncio.run(_resolved(Address("::1", 80))) == ["[::1]:80"]


async def _resolved(name: Address) -> Sequence[str]:
    return await look_up(name)
