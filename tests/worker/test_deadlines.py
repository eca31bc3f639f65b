"""Who runs out of time, and what is remembered of those that do not."""

import gc
import weakref
from collections.abc import Sequence

from prefixgate.cache.hashing import CacheScope
from prefixgate.worker.deadlines import Deadlines
from prefixgate.worker.outbox import News
from prefixgate.worker.request import Request, RequestState, SamplingParams


class Prompt(list[int]):
    """A list that can be watched."""


class Silence:
    def deliver(self, step: int, news: Sequence[News]) -> None:
        """Hear nothing."""


def request(deadline_seconds: float | None, received_at: float = 0.0) -> Request:
    made = Request(
        Prompt([1]), CacheScope("acme", "m"), SamplingParams(1), Silence(), deadline_seconds=deadline_seconds
    )
    made.received_at = received_at
    return made


def test_calls_come_due_in_the_order_of_their_deadlines() -> None:
    deadlines = Deadlines()
    late, soon, never, same = request(9.0), request(1.0, 4.0), request(None), request(5.0)
    for call in (late, soon, never, same):
        deadlines.add(call, call.deadline_seconds)
    assert list(deadlines.take_overdue(4.99)) == []
    assert list(deadlines.take_overdue(5.0)) == [soon, same]
    assert list(deadlines.take_overdue(1e9)) == [late]
    assert list(deadlines.take_overdue(1e9)) == []


def test_ended_calls_are_forgotten_long_before_their_deadline() -> None:
    deadlines, watched = Deadlines(), []
    for _ in range(1000):
        call = request(86_400.0)
        watched.append(weakref.ref(call.token_ids))
        deadlines.add(call, call.deadline_seconds)
        call.state = RequestState.ENDED
    del call
    gc.collect()
    assert sum(1 for prompt in watched if prompt() is not None) < 200
