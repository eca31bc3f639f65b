"""The page is made now and then, and served as bytes in between."""

import pytest

from prefixgate.proto.exposition import Family
from prefixgate.proto.metrics_page import MetricsPage
from tests.integration.waiting import until


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Things:
    """What is shown: how often it was asked for."""

    def __init__(self) -> None:
        self.reads = 0
        self.broken = False

    def __call__(self) -> list[Family]:
        self.reads += 1
        if self.broken:
            raise RuntimeError("secret")
        return [Family("reads", "gauge", "Reads.", (), {(): self.reads})]


def page_of(things: Things, max_age_seconds: float) -> tuple[MetricsPage, Clock]:
    clock = Clock()
    page = MetricsPage(max_age_seconds, clock)
    page.show(things)
    return page, clock


def test_a_page_is_served_until_it_is_too_old_with_its_age() -> None:
    things = Things()
    page, clock = page_of(things, 0.25)
    first = page.read()
    assert first.age_seconds == 0
    clock.now += 0.2
    again = page.read()
    assert again.body is first.body
    assert again.age_seconds == pytest.approx(0.2)
    assert things.reads == 1
    clock.now += 0.05
    assert page.read().age_seconds == 0
    assert things.reads == 2


def test_an_age_of_zero_makes_each_page_anew() -> None:
    things = Things()
    page, _ = page_of(things, 0)
    assert [page.read().body for _ in range(3)] == [
        f"# HELP reads Reads.\n# TYPE reads gauge\nreads {number}\n".encode() for number in (1, 2, 3)
    ]


def test_a_page_that_cannot_be_made_is_tried_again() -> None:
    things = Things()
    page, _ = page_of(things, 60)
    things.broken = True
    with pytest.raises(RuntimeError):
        page.read()
    things.broken = False
    assert b"reads 2" in page.read().body


def test_what_is_shown_can_change_and_is_nothing_at_first() -> None:
    page = MetricsPage(60, Clock())
    assert page.read().body == b""
    page.show(Things())
    assert b"reads 1" in page.read().body


def test_a_started_page_is_made_before_it_is_asked_for() -> None:
    things = Things()
    page = MetricsPage(0.01)
    page.show(things)
    page.start()
    try:
        until(lambda: things.reads >= 3, "three pages were made")
        reads = things.reads
        assert page.read().body.startswith(b"# HELP reads")
        until(lambda: things.reads > reads, "another page was made")
    finally:
        page.stop()
    reads = things.reads
    page.read()
    assert things.reads <= reads + 1


def test_a_started_page_that_cannot_be_made_says_so_and_comes_back() -> None:
    things = Things()
    page = MetricsPage(0.01)
    page.show(things)
    page.start()
    try:
        page.read()
        things.broken = True
        until(lambda: is_refused(page), "the page is refused")
        things.broken = False
        until(lambda: not is_refused(page), "the page is back")
    finally:
        page.stop()


def is_refused(page: MetricsPage) -> bool:
    try:
        page.read()
    except RuntimeError:
        return True
    return False
