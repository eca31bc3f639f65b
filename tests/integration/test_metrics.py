"""The metrics pages of real processes: what they say they are, and that no client can make them grow."""

import random
import string

import grpc
import pytest

from tests.integration.asking import Stream, prompt
from tests.integration.scrape import Page
from tests.integration.sidecar import Sidecar
from tests.project.metrics_page import Line, read_page

PAGE = read_page()


@pytest.fixture(scope="module")
def pages(sidecar: Sidecar) -> dict[str, Page]:
    """Both pages, after calls that touched every metric."""
    with sidecar.channel() as channel:
        assert Stream(channel, prompt("0 all", 40, n=2)).rest() is grpc.StatusCode.OK
        assert Stream(channel, prompt("", 1), tenant="mallory").rest() is grpc.StatusCode.UNAUTHENTICATED
        assert Stream(channel, prompt("", 1, n=1000)).rest() is grpc.StatusCode.INVALID_ARGUMENT
    gateway, worker = sidecar.until_idle()
    return {"gateway": gateway, "worker": worker}


@pytest.mark.parametrize("process", PAGE)
def test_a_scrape_holds_what_the_page_says_and_nothing_else(process: str, pages: dict[str, Page]) -> None:
    assert pages[process].kinds == {line.name: line.kind for line in PAGE[process]}


@pytest.mark.parametrize(
    ("process", "line"), [(process, line) for process, lines in PAGE.items() for line in lines], ids=str
)
def test_samples_carry_the_labels_that_the_page_names(process: str, line: Line, pages: dict[str, Page]) -> None:
    assert pages[process].labels(line.name) == set(line.labels)


def test_names_that_clients_choose_make_no_series(sidecar: Sidecar) -> None:
    rng = random.Random(3)
    chosen: set[str] = set()

    def anything() -> str:
        name = "".join(rng.choices(string.ascii_letters, k=12))
        chosen.add(name)
        return name

    def call(channel: grpc.Channel) -> None:
        served = prompt("0 series", 2)
        served.request_id, served.cache.salt = anything(), anything()
        unserved = prompt("0 series", 2)
        unserved.model = anything()
        for request, tenant in ((served, "bolt"), (served, anything()), (unserved, "bolt")):
            Stream(channel, request, tenant).rest()

    with sidecar.channel() as channel:
        for _ in range(100):
            call(channel)
    pages = sidecar.until_idle()
    # By what the labels say, not by which series there are: some begin with what happens to a call, as time goes by.
    said = [value for page in pages for _, labels in page.samples for _, value in labels]
    assert not {name for name in chosen if any(name in value for value in said)}
