"""The HTTP port."""

import contextlib
import http.client
import socket
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixgate.proto.exposition import Family
from prefixgate.proto.http_server import MAX_CONNECTIONS, MAX_HEAD_BYTES, Check, HttpServer
from prefixgate.proto.metrics_page import MetricsPage


class State:
    live = True
    ready = False
    broken = False

    def collect(self) -> list[Family]:
        if self.broken:
            raise RuntimeError("secret")
        return [Family("things_total", "counter", "Things.", (), {(): 3})]


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def server(state: State) -> Iterator[HttpServer]:
    page = MetricsPage(0)
    page.show(state.collect)
    checks = {
        "/healthz": lambda: Check(state.live, "alive" if state.live else "dead"),
        "/readyz": lambda: Check(state.ready, "ready" if state.ready else "not ready"),
    }
    server = HttpServer("127.0.0.1", 0, page, checks)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def connection(server: HttpServer) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    yield connection
    connection.close()


def get(connection: http.client.HTTPConnection, path: str) -> tuple[int, str]:
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_metrics_are_served_as_prometheus_reads_them(connection: http.client.HTTPConnection) -> None:
    connection.request("GET", "/metrics?name=x")
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("Age")) == (200, "0")
    assert answer.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    (family,) = text_string_to_metric_families(answer.read().decode())
    assert (family.name, family.samples[0].value) == ("things", 3)


def test_each_check_is_a_question_of_its_own(connection: http.client.HTTPConnection, state: State) -> None:
    assert [get(connection, path) for path in ("/healthz", "/readyz")] == [(200, "alive\n"), (503, "not ready\n")]
    state.ready = True
    assert [get(connection, path) for path in ("/healthz", "/readyz?x")] == [(200, "alive\n"), (200, "ready\n")]
    state.live = state.ready = False
    assert [get(connection, path)[0] for path in ("/healthz", "/readyz")] == [503, 503]


def test_a_connection_is_kept(connection: http.client.HTTPConnection) -> None:
    assert get(connection, "/healthz")[0] == 200
    own = connection.sock
    assert get(connection, "/metrics")[0] == 200
    assert connection.sock is own is not None


def test_an_unknown_path_is_not_found_and_told_what_there_is(connection: http.client.HTTPConnection) -> None:
    assert get(connection, "/") == (404, "here are /metrics, /healthz, /readyz\n")


def test_metrics_that_cannot_be_read_are_an_error_that_tells_no_more(
    connection: http.client.HTTPConnection, state: State
) -> None:
    state.broken = True
    assert get(connection, "/metrics") == (500, "the page could not be made\n")
    state.broken = False
    assert get(connection, "/metrics")[0] == 200


def test_a_client_that_leaves_amid_its_request_hurts_no_other(
    server: HttpServer, connection: http.client.HTTPConnection
) -> None:
    for sent in (b"", b"GET /metrics HTTP/1.1\r\n", b"\xff\x00\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(sent)
    assert get(connection, "/healthz")[0] == 200


def test_connections_that_say_nothing_are_bounded_and_keep_nobody_out(
    server: HttpServer, connection: http.client.HTTPConnection
) -> None:
    with contextlib.ExitStack() as held:
        silent = [
            held.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            for _ in range(MAX_CONNECTIONS)
        ]
        for number in range(3):
            # Whoever asks is taken in, and is not the one that makes way for those who come after it.
            assert get(connection, "/healthz")[0] == 200, number
            own = connection.sock
            silent.append(held.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)))
        assert get(connection, "/healthz")[0] == 200
        assert connection.sock is own
        # The first of the silent ones were closed for those.
        assert [one.recv(1) for one in silent[:4]] == [b""] * 4


def test_a_head_that_does_not_end_is_refused(server: HttpServer) -> None:
    begun = b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 50 + b"X: "
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(begun + b"y" * (MAX_HEAD_BYTES + 1 - len(begun)))
        assert client.makefile("rb").readline().startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("header", [b"Content-Length: 8", b"Transfer-Encoding: chunked"])
def test_a_body_cannot_pass_for_the_next_request(server: HttpServer, header: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n")
        # To the end of the connection, before any of the body is sent.
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nConnection: close\r\n" in answer


def test_an_address_in_use_is_an_error(server: HttpServer) -> None:
    with pytest.raises(OSError, match="in use"):
        HttpServer("127.0.0.1", server.port, MetricsPage(0), {})


def test_a_server_that_never_started_can_be_stopped() -> None:
    server = HttpServer("127.0.0.1", 0, MetricsPage(0), {})
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
