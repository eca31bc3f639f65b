"""Lines of waiting calls, one for each tenant."""

from collections.abc import Sequence

from prefixgate.cache.hashing import CacheScope
from prefixgate.worker.outbox import News
from prefixgate.worker.request import Request, SamplingParams
from prefixgate.worker.waiting import Line, WaitingCalls


class Silence:
    def deliver(self, step: int, news: Sequence[News]) -> None:
        """Hear nothing."""


def request(arrival: int, tenant: str = "acme", *, priority: int = 0, n: int = 1, preemptions: int = 0) -> Request:
    call = Request([1, 2], CacheScope(tenant, "m"), SamplingParams(4), Silence(), n=n)
    call.rank, call.received_at, call.preemptions = (-priority, arrival), float(arrival), preemptions
    return call


def test_each_tenant_has_its_line_by_priority_then_arrival() -> None:
    waiting = WaitingCalls()
    calls = [request(1), request(2, priority=5), request(3, "bolt"), request(4, priority=5)]
    for call in reversed(calls):
        waiting.add(call)
    order = []
    while (first := waiting.first("acme")) is not None:
        order.append(first)
        waiting.remove(first)
    assert order == [calls[1], calls[3], calls[0]]
    assert waiting.tenants() == ["bolt"]
    assert list(waiting) == [calls[2]]


def test_a_call_that_is_set_aside_waits_and_is_passed_over() -> None:
    waiting = WaitingCalls()
    first, second = request(1), request(2)
    for call in (first, second):
        waiting.add(call)
    waiting.set_aside(first)
    assert (waiting.first("acme"), len(waiting), waiting.num_new) == (second, 2, 2)
    waiting.set_aside(second)
    assert (waiting.first("acme"), waiting.tenants()) == (None, [])
    waiting.put_back(first)
    assert waiting.first("acme") is first
    for call in (second, first):
        waiting.remove(call)
    assert (len(waiting), waiting.num_new, waiting.num_sequences) == (0, 0, 0)


def test_who_goes_where_too_many_wait_is_new_and_last() -> None:
    waiting = WaitingCalls()
    calls = [request(number) for number in range(3)]
    others = [request(number, "bolt") for number in range(10, 14)]
    begun = request(20, "bolt", preemptions=1)
    for call in (*calls, *others, begun):
        waiting.add(call)
    assert (len(waiting), waiting.num_new) == (8, 7)
    assert waiting.lines() == {"acme": Line(3, 0.0), "bolt": Line(4, 10.0)}
    assert waiting.last_of_largest(lambda tenant: 1.0) is others[-1]
    assert waiting.last_of_largest({"acme": 1.0, "bolt": 2.0}.__getitem__) is calls[-1]


def test_outputs_are_counted_as_they_end() -> None:
    waiting = WaitingCalls()
    call = request(1, n=3)
    waiting.add(call)
    call.num_unfinished -= 1
    waiting.output_ended()
    assert waiting.num_sequences == 2
    waiting.remove(call)
    assert waiting.num_sequences == 0
