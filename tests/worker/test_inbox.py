"""What other threads leave for the engine."""

import threading
from collections.abc import Sequence

import pytest

from prefixgate.cache.hashing import CacheScope
from prefixgate.worker.inbox import Cancellation, Inbox, InboxClosedError
from prefixgate.worker.outbox import News
from prefixgate.worker.request import Request, SamplingParams


class Silence:
    def deliver(self, step: int, news: Sequence[News]) -> None:
        """Hear nothing."""


def request() -> Request:
    return Request([1], CacheScope("acme", "m"), SamplingParams(1), Silence())


def test_commands_are_taken_once_in_order() -> None:
    inbox, first, second = Inbox(), request(), request()
    inbox.submit(first)
    inbox.cancel(Cancellation(first, 0))
    inbox.submit(second)
    inbox.cancel(Cancellation(second))
    assert inbox.num_submits == 2
    commands = inbox.take()
    assert commands.submits == [first, second]
    assert commands.cancels == [(first, 0), (second, None)]
    assert inbox.num_submits == 0
    assert inbox.take() == ([], [])


def test_what_was_left_before_a_close_can_be_taken_and_nothing_comes_after() -> None:
    inbox, call = Inbox(), request()
    inbox.submit(call)
    inbox.close()
    with pytest.raises(InboxClosedError):
        inbox.submit(request())
    inbox.cancel(Cancellation(call))
    assert inbox.take() == ([call], [])


@pytest.mark.parametrize("wake", ["submit", "cancel", "close"])
def test_a_waiting_thread_is_woken_by_everything_that_concerns_it(wake: str) -> None:
    inbox, woken = Inbox(), []
    thread = threading.Thread(target=lambda: woken.append(inbox.wait(timeout=30)))
    thread.start()
    {
        "submit": lambda: inbox.submit(request()),
        "cancel": lambda: inbox.cancel(Cancellation(request())),
        "close": inbox.close,
    }[wake]()
    thread.join(timeout=30)
    assert woken == [True]


def test_waiting_in_vain_says_so() -> None:
    assert Inbox().wait(timeout=0) is False
