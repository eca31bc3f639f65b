"""The HTTP port."""

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from prefixgate.config.address import Address
from prefixgate.worker.status_page import StatusPage


class State:
    live = True
    ready = False
    broken = False


class Collected:
    def __init__(self, state: State) -> None:
        self.state = state

    def collect(self) -> list[object]:
        if self.state.broken:
            raise RuntimeError("secret")
        return []


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def page(state: State) -> Iterator[StatusPage]:
    registry = CollectorRegistry()
    Counter("things_total", "Things.", registry=registry).inc(3)
    registry.register(Collected(state))  # type: ignore[arg-type]
    page = StatusPage(Address("127.0.0.1", 0), registry, live=lambda: state.live, ready=lambda: state.ready)
    yield page
    page.close()


def get(page: StatusPage, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{page.port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_are_served_as_prometheus_reads_them(page: StatusPage) -> None:
    code, text = get(page, "/metrics?name=x")
    assert code == 200
    (family,) = [family for family in text_string_to_metric_families(text) if family.name == "things"]
    assert family.samples[0].value == 3


def test_live_and_ready_are_two_questions(page: StatusPage, state: State) -> None:
    assert [get(page, path)[0] for path in ("/healthz", "/readyz")] == [200, 503]
    state.ready = True
    assert [get(page, path)[0] for path in ("/healthz", "/readyz")] == [200, 200]
    state.live = state.ready = False
    assert [get(page, path)[0] for path in ("/healthz", "/readyz")] == [503, 503]


def test_an_unknown_path_is_not_found_and_told_what_there_is(page: StatusPage) -> None:
    assert get(page, "/") == (404, "there are /metrics, /healthz and /readyz\n")


def test_metrics_that_cannot_be_read_are_an_error_that_tells_no_more(page: StatusPage, state: State) -> None:
    state.broken = True
    assert get(page, "/metrics") == (500, "the metrics could not be read\n")
    state.broken = False
    assert get(page, "/metrics")[0] == 200


def test_a_client_that_leaves_amid_its_request_hurts_no_other(page: StatusPage) -> None:
    for sent in (b"", b"GET /metrics HTTP/1.1\r\n", b"\xff\x00\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", page.port)) as client:
            client.sendall(sent)
    assert get(page, "/healthz")[0] == 200


def test_an_address_in_use_is_an_error(page: StatusPage) -> None:
    with pytest.raises(OSError, match="in use"):
        StatusPage(Address("127.0.0.1", page.port), CollectorRegistry(), live=lambda: True, ready=lambda: True)
