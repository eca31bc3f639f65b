"""When a worker is left alone, and how it comes back."""

from hypothesis import given
from hypothesis import strategies as st

from prefixgate.gateway.backoff import Backoff
from prefixgate.gateway.circuit_breaker import CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(failures=3, backoff=Backoff(first=1.0, longest=8.0), clock=clock)


def may_be_called(circuit: CircuitBreaker) -> bool:
    return circuit.allows


def test_failures_in_a_row_open_it_and_others_do_not() -> None:
    circuit = breaker(Clock())
    for _ in range(5):
        assert not circuit.fail()
        assert not circuit.fail()
        circuit.succeed()
    assert not circuit.fail()
    assert not circuit.fail()
    assert may_be_called(circuit)
    assert circuit.fail()
    assert not may_be_called(circuit)
    assert not circuit.is_closed


def test_after_a_pause_one_call_at_a_time_may_try() -> None:
    clock = Clock()
    circuit = breaker(clock)
    for _ in range(3):
        circuit.fail()
    # A call that goes there as nobody else is well is no try.
    assert not circuit.begin()
    clock.now = 1.0
    assert may_be_called(circuit)
    assert circuit.begin()
    assert not may_be_called(circuit)
    assert not circuit.begin()
    circuit.end()
    assert may_be_called(circuit)
    assert circuit.begin()
    circuit.succeed()
    circuit.end()
    assert circuit.is_closed
    assert not circuit.begin()


def test_each_try_that_fails_makes_the_pause_longer_up_to_a_bound() -> None:
    clock = Clock()
    circuit = breaker(clock)
    for _ in range(3):
        circuit.fail()
    for bound in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert not may_be_called(circuit)
        clock.now += bound
        assert circuit.begin()
        assert not circuit.fail()
        circuit.end()


def test_calls_that_were_under_way_when_it_opened_do_not_prolong_it() -> None:
    clock = Clock()
    circuit = breaker(clock)
    opened = [circuit.fail() for _ in range(50)]
    assert opened.count(True) == 1
    clock.now = 1.0
    assert may_be_called(circuit)


@given(st.lists(st.sampled_from(["begin", "end", "succeed", "fail", "wait"])))
def test_whatever_happens_it_can_be_tried_again_once_no_call_tries_it(events: list[str]) -> None:
    clock = Clock()
    circuit = breaker(clock)
    trying = False
    for event in events:
        if event == "begin":
            # What the fleet asks of it: no call without leave but where nobody else is left.
            trying |= circuit.begin()
        elif event == "end":
            circuit.end()
            trying = False
        elif event == "wait":
            clock.now += 1.0
        else:
            getattr(circuit, event)()
    if trying:
        circuit.end()
    clock.now += 8.0
    assert may_be_called(circuit)
