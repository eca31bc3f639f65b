"""`prefixgate stats` and `top`."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import grpc
import pytest
from rich.console import Console

from prefixgate.gateway.cli import main
from prefixgate.gateway.commands.snapshot import Page, PageError, Snapshot, change, read_page
from prefixgate.gateway.commands.top_view import frame
from prefixgate.proto import gateway_pb2
from tests.gateway.commands.scripted_gateway import ScriptedGateway

PAGE = """\
# HELP prefixgate_gateway_completion_tokens_total Tokens
# TYPE prefixgate_gateway_completion_tokens_total counter
prefixgate_gateway_completion_tokens_total{tenant="a"} 30.0
prefixgate_gateway_completion_tokens_total{tenant="b"} 12.0
# TYPE prefixgate_gateway_live_calls gauge
prefixgate_gateway_live_calls 4.0
# TYPE prefixgate_gateway_waiting_calls gauge
prefixgate_gateway_waiting_calls 1.0
"""


def stats(*lives: str, queried: int = 0, hits: int = 0, active: int = 8, cached: int = 32) -> gateway_pb2.StatsResponse:
    tenant = gateway_pb2.TenantStats(
        running_calls=2,
        waiting_calls=1,
        active_blocks=active,
        cached_blocks=cached,
        cap_blocks=64,
        pins=1,
        pinned_blocks=4,
        queried_tokens=queried,
        hit_tokens=hits,
    )
    pool = gateway_pb2.PoolStats(block_size=16, total_blocks=64, pin_limit_blocks=6)
    workers = [gateway_pb2.WorkerStats(incarnation=life, pool=pool, tenant=tenant) for life in lives]
    return gateway_pb2.StatsResponse(model="m", context_length=2048, tenant=tenant, workers=workers)


def drawn(before: Snapshot, now: Snapshot, problem: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    console.print(frame("here", before, now, problem))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def line(lines: list[str], title: str) -> str:
    return next(text.removeprefix(title).strip() for text in lines if text.startswith(title))


@contextmanager
def page(text: str, status: int = 200) -> Iterator[str]:
    """Serve one page, and give the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_stats_tells_each_worker_and_the_sum(
    gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["Stats"] = stats("life-1-and-more", "life-2", queried=1000, hits=875)
    assert main(["stats", "--address", socket]) == 0
    output = capsys.readouterr().out
    assert output.startswith("m, context of 2,048 tokens\n")
    rows = [[cell.strip() for cell in row.strip("│┃").replace("┃", "│").split("│")] for row in output.splitlines()]
    assert ["worker", "life-1-a", "life-2", "all"] in rows
    assert ["prompt tokens looked up", "1,000", "1,000", "1,000"] in rows
    assert ["hit rate", "87.5%", "87.5%", "87.5%"] in rows
    assert ["blocks of the pool", "64", "64", ""] in rows
    assert "\x1b" not in output
    assert main(["stats", "--json", "--address", socket]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tenant"]["hit_tokens"] == 875
    assert [worker["pool"]["total_blocks"] for worker in document["workers"]] == [64, 64]


def test_top_once_prints_what_it_sees(
    gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["Stats"] = stats("life-1", queried=1000, hits=875)
    with page(PAGE) as http:
        assert main(["top", "--once", "--interval", "0.01", "--address", socket, "--http", http]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    lines = [text.rstrip() for text in output.splitlines()]
    assert line(lines, "pool") == "█" * 5 + "▒" * 20 + "·" * 15
    assert line(lines, "calls") == "2 running, 1 waiting"
    assert line(lines, "gateway") == "4 calls of all tenants, 1 of them without a token yet"
    assert line(lines, "tokens") == "0/s out, 0/s in, of all tenants"
    assert line(lines, "life-1").split()[1:] == ["8", "32", "64", "2", "1", "87.5%"]


def test_rates_are_of_what_happened_in_between() -> None:
    before = Snapshot(10.0, stats("a", "b", queried=1000, hits=500), Page(100, 1000, 500, 1, 0))
    now = Snapshot(12.0, stats("b", "a", queried=1400, hits=800), Page(150, 1400, 800, 1, 0))
    since = change(before, now)
    assert (since.seconds, since.queried_tokens, since.hit_tokens) == (2.0, 400, 300)
    assert (since.completion_rate, since.prompt_rate) == (25.0, 200.0)
    lines = drawn(before, now)
    assert line(lines, "hit rate") == "75.0% of 400 prompt tokens in 2.0 s"
    assert line(lines, "tokens") == "25/s out, 200/s in, of all tenants"


def test_a_restart_in_between_makes_no_rates() -> None:
    before = Snapshot(10.0, stats("a", queried=1000, hits=500), Page(100, 1000, 500, 1, 0))
    now = Snapshot(12.0, stats("b", queried=10, hits=5), Page(1, 10, 5, 1, 0))
    since = change(before, now)
    assert (since.queried_tokens, since.hit_tokens, since.completion_rate, since.prompt_rate) == (None,) * 4
    lines = drawn(before, now)
    assert line(lines, "hit rate") == "not known: a worker came, went or restarted"
    assert not any(text.startswith("tokens") for text in lines)


@pytest.mark.parametrize(("active", "cached"), [(0, 0), (1, 0), (64, 0), (0, 64), (63, 1), (1, 63), (32, 32), (90, 90)])
def test_a_bar_is_never_longer_than_the_pool(active: int, cached: int) -> None:
    now = Snapshot(0.0, stats("a", active=active, cached=cached), None)
    bar = line(drawn(now, now), "pool")
    assert len(bar) == 40
    assert bar == "█" * bar.count("█") + "▒" * bar.count("▒") + "·" * bar.count("·")
    assert (bar.count("█") > 0) == (active > 0)


def test_a_page_that_cannot_be_had_is_told_and_the_rest_shown() -> None:
    now = Snapshot(0.0, stats("a"), None, "http://x/metrics: Connection refused")
    lines = drawn(now, now, "no gateway answers; trying again")
    assert line(lines, "gateway") == "http://x/metrics: Connection refused"
    assert lines[-1] == "no gateway answers; trying again"


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [(PAGE, 404, "Not Found"), ("<html>{", 200, "is no metrics page"), ("other 1\n", 200, "is not a gateway's page")],
)
def test_another_page_is_no_page(text: str, status: int, words: str) -> None:
    with page(text, status) as http, pytest.raises(PageError, match=words):
        read_page(f"http://{http}/metrics")
    with pytest.raises(PageError, match="refused"):
        read_page(f"http://{http}/metrics")


def test_top_goes_on_while_the_gateway_is_away_and_ctrl_c_ends_it(gateway: ScriptedGateway, socket: str) -> None:
    gateway.answers["Stats"] = stats("life-1")
    command = [sys.executable, "-m", "prefixgate.gateway", "top", "--address", socket, "--interval", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(text.startswith("life-1") for text in process.stdout)
        gateway.error = (grpc.StatusCode.INTERNAL, "broken")
        assert any(text.rstrip() == "INTERNAL: broken; trying again" for text in process.stdout)
        gateway.error = None
        assert any(text.startswith("calls") for text in process.stdout)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (0, "")


def test_top_needs_a_gateway_to_begin(socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--address", socket]) == 1
    assert "no gateway answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--interval", "0"], "--interval: '0' is not a number of seconds above 0"),
        (["--http", "unix:/a"], "--http: 'unix:/a' is not HOST:PORT"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["top", *arguments])
    assert refusal.value.code == 2
    assert words in capsys.readouterr().err
