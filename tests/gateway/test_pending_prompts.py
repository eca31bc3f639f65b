"""What is left to compute, as time goes by and news come."""

from prefixgate.gateway.pending_prompts import PendingPrompts


def test_nothing_is_left_of_nothing() -> None:
    assert PendingPrompts().left(100.0, 10.0) == 0.0


def test_time_takes_from_the_oldest_prompt_and_no_more_than_it_has() -> None:
    pending = PendingPrompts()
    pending.add(100, 0.0)
    pending.add(50, 5.0)
    assert pending.left(5.0, 10.0) == 100.0
    assert pending.left(10.0, 10.0) == 50.0
    # It should be done by now; as nobody said so, the second has not begun.
    assert pending.left(1000.0, 10.0) == 50.0


def test_news_begin_the_next_prompt() -> None:
    pending = PendingPrompts()
    first = pending.add(100, 0.0)
    second = pending.add(50, 0.0)
    pending.remove(first, 20.0)
    pending.remove(first, 21.0)
    assert len(pending) == 1
    assert pending.left(21.0, 10.0) == 40.0
    pending.remove(second, 30.0)
    assert pending.left(30.0, 10.0) == 0.0


def test_a_worker_that_was_idle_has_done_nothing_in_advance() -> None:
    pending = PendingPrompts()
    pending.remove(pending.add(100, 0.0), 1.0)
    pending.add(100, 50.0)
    assert pending.left(50.0, 10.0) == 100.0
