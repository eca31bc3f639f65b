"""The status page and its document over HTTP, in front of a worker that the test plays."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from prefixgate.config.settings import GatewaySettings, Settings
from prefixgate.gateway.status_board import PAUSE_SECONDS
from prefixgate.gateway.status_document import MAX_CALLS, StatusDocument
from prefixgate.gateway.status_history import StatusHistory
from prefixgate.gateway.tenants import digest_api_key
from prefixgate.proto import worker_pb2
from tests.gateway.fake_worker import FakeWorker
from tests.gateway.fleeted import fleeted
from tests.gateway.rig import Client, prompt, rig, run
from tests.project.tree import ROOT

PATHS = ("/status", "/status.json", "/status.css", "/status.js", "/status_map.js", "/status_charts.js", "/status.svg")


async def fetch(rig: Client, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    """GET a path, with the headers that ``http.client`` would not send by itself."""

    def get() -> tuple[int, dict[str, str], str]:
        connection = HTTPConnection(rig.server.http_address.host, rig.server.http_address.port, timeout=60)
        try:
            connection.request("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(get)


async def document(rig: Client, **headers: str) -> dict[str, Any]:
    status, _, body = await fetch(rig, "/status.json", **headers)
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


def surveyed(**changes: Any) -> FakeWorker:
    worker = FakeWorker()
    worker.survey = worker_pb2.WorkerSurvey(
        incarnation="life-1",
        pool=worker_pb2.PoolCounts(total=8, free=3, active=3, cached=2, pinned=1),
        running_calls=2,
        waiting_calls=1,
        queried_tokens=100,
        hit_tokens=40,
        misses={"evicted": 3, "never_seen": 0, "diverged": 0, "bypassed": 0},
        tenants=[worker_pb2.TenantSurvey(tenant="local", active_blocks=3, cached_blocks=2, cap_blocks=8)],
        **changes,
    )
    worker.drawn_map = worker_pb2.PoolMap(
        blocks_per_cell=4,
        stride=1,
        free=[1, 2],
        active=[2, 1],
        cached=[1, 1],
        pinned=[1, 0],
        holders=[3, 1],
        owner=[1, 1],
        sharing=[2, 0, 1],
    )
    return worker


def test_the_document_tells_what_the_workers_tell() -> None:
    async def scenario() -> None:
        async with rig(surveyed()) as at:
            found = await document(at)
            assert found["pool"] == {"total": 8, "free": 3, "active": 3, "cached": 2, "pinned": 1}
            assert (found["state"], found["model"]["name"]) == ("ready", "fake")
            assert (found["totals"]["queried_tokens"], found["totals"]["hit_tokens"]) == (100, 40)
            assert found["misses"] == {"evicted": 3, "never_seen": 0, "diverged": 0, "bypassed": 0}
            assert set(found["history"]["misses"]) == set(found["misses"])
            (worker,) = found["workers"]
            assert (worker["state"], worker["survey"]["incarnation"]) == ("serving", "life-1")
            assert worker["survey"]["map"]["holders"] == [3, 1]
            assert worker["survey"]["map"]["sharing"] == [2, 0, 1]
            (tenant,) = found["tenants"]
            assert (tenant["name"], tenant["active_blocks"], tenant["live_calls"]) == ("local", 3, 0)
            assert (found["overlap"], found["calls"]["live"]) == (None, 0)

    run(scenario())


def paths(value: Any, at: str = "") -> Iterator[str]:
    """Name the values of a document as its page does, and what holds them."""
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, f"{at}.{key}" if at else key)
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, f"{at}[]")


def test_the_document_is_what_its_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "status.md").read_text()
    rows = re.findall(r"^\| (`[^|]+`) \|", page.partition("## The document")[2], re.MULTILINE)
    told = {field for row in rows for field in re.findall(r"`([^`]+)`", row)}

    async def scenario() -> None:
        async with fleeted(tmp_path, surveyed(), surveyed()) as at:
            stream = at.client.stub.Generate(prompt("hi"))
            await at.next_call()
            found = await document(at.client)
            while found["history"]["total"][-1] != 16 or not all(one["survey"]["map"] for one in found["workers"]):
                found = await document(at.client)
            there = set(paths(found)) - {""}
            assert sorted(told - there) == []
            # What holds others needs no line of its own.
            held = {path for path in there if any(re.match(rf"{re.escape(path)}[.\[]", other) for other in there)}
            assert sorted(there - held - told) == []
            stream.cancel()

    run(scenario())


def test_calls_are_told_of_without_their_text_and_names_as_they_are() -> None:
    async def scenario() -> None:
        async with rig(surveyed()) as at:
            stream = at.stub.Generate(prompt("a secret prompt", request_id="plain"))
            call = await at.next_call()
            (told,) = (await document(at))["calls"]["oldest"]
            assert (told["id"], told["tenant"], told["method"]) == ("plain", "local", "Generate")
            assert (told["awaits_first_token"], told["completion_tokens"]) == (True, 0)
            assert told["prompt_tokens"] == len(call.submit.token_ids)
            assert told["worker"] == (await document(at))["workers"][0]["address"]
            await call.send((0, [65, 66]))
            await anext(aiter(stream))
            found = await document(at)
            while found["calls"]["oldest"][0]["completion_tokens"] != 2:
                found = await document(at)
            assert not found["calls"]["oldest"][0]["awaits_first_token"]
            assert "secret" not in json.dumps(found)
            stream.cancel()

    run(scenario())


def test_of_many_calls_the_oldest_are_told_of_one_by_one() -> None:
    async def scenario() -> None:
        async with rig(surveyed()) as at:
            streams = []
            for number in range(MAX_CALLS + 5):
                streams.append(at.stub.Generate(prompt("hi", request_id=f"call-{number}")))
                await at.next_call()
            found = await document(at)
            while found["calls"]["live"] != len(streams):
                found = await document(at)
            assert [call["id"] for call in found["calls"]["oldest"]] == [f"call-{n}" for n in range(MAX_CALLS)]
            (tenant,) = found["tenants"]
            assert tenant["live_calls"] == len(streams)
            for stream in streams:
                stream.cancel()

    run(scenario())


def test_a_map_is_asked_for_while_somebody_looks_and_once_however_many_look() -> None:
    async def scenario() -> None:
        worker = surveyed()
        async with rig(worker) as at:
            assert worker.map_sizes.empty()
            began = time.monotonic()
            documents = await asyncio.gather(*(document(at) for _ in range(20)))
            made = len({found["time"] for found in documents})
            assert made <= 1 + (time.monotonic() - began) / PAUSE_SECONDS
            assert 1 <= worker.map_sizes.qsize() <= made
            assert await worker.map_sizes.get() == 4096

    run(scenario())


def test_a_worker_that_does_not_draw_its_map_delays_the_page_by_a_moment_only() -> None:
    async def scenario() -> None:
        worker = surveyed()
        async with rig(worker) as at:
            while (await document(at))["workers"][0]["survey"] is None:
                pass
            worker.answers.clear()
            # The last one is shown as long as it is not too old.
            survey = (await document(at))["workers"][0]["survey"]
            assert survey["pool"]["total"] == 8
            worker.answers.set()

    run(scenario())


def test_without_a_worker_the_page_says_so() -> None:
    async def scenario() -> None:
        async with rig(surveyed()) as at:
            at.session.close()
            worker = at.worker
            worker.description = None
            found = await document(at)
            while found["state"] != "no worker":
                found = await document(at)
            while found["workers"][0]["survey"] is not None:
                found = await document(at)
            assert found["workers"][0]["state"] == "not connected"
            assert (found["pool"]["total"], found["totals"]["running_calls"], found["tenants"]) == (0, 0, [])

    run(scenario())


def test_every_part_comes_with_headers_that_keep_it_to_itself() -> None:
    async def scenario() -> None:
        async with rig(surveyed()) as at:
            for path in PATHS:
                status, headers, body = await fetch(at, path)
                assert (status, bool(body)) == (200, True), path
                policy = headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy
                assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
                assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
                assert "Access-Control-Allow-Origin" not in headers

    run(scenario())


@pytest.mark.parametrize("path", PATHS)
def test_no_part_is_for_other_sites_or_names(path: str) -> None:
    async def scenario() -> None:
        async with rig(surveyed()) as at:
            assert (await fetch(at, path, Host="rebound.example:8051"))[0] == 403
            assert (await fetch(at, path, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors"))[0] == 403
            assert (await fetch(at, path, Origin="https://evil.example"))[0] == 403

    run(scenario())


@pytest.mark.parametrize("path", PATHS)
def test_with_a_key_no_part_is_shown_without_it(path: str) -> None:
    async def scenario() -> None:
        async with rig(surveyed(), operator_keys=(digest_api_key(b"pg-op"),)) as at:
            status, headers, body = await fetch(at, path)
            assert (status, headers["WWW-Authenticate"][:5]) == (401, "Basic")
            assert "fake" not in body
            assert (await fetch(at, path, Authorization="Bearer pg-op"))[0] == 200
            # Metrics and probes stay as they were.
            assert (await fetch(at, "/healthz"))[0] == (await fetch(at, "/metrics"))[0] == 200

    run(scenario())


def test_keys_are_exchanged_while_the_gateway_runs() -> None:
    async def scenario() -> None:
        async with rig(surveyed()) as at:
            assert (await fetch(at, "/status.json"))[0] == 200
            at.server.apply(Settings(gateway=GatewaySettings(operator_keys=(digest_api_key(b"pg-op"),))))
            assert (await fetch(at, "/status.json"))[0] == 401
            assert (await fetch(at, "/status.json", Authorization="Bearer pg-op"))[0] == 200

    run(scenario())


def test_what_cannot_be_asked_or_written_ends_neither_the_gateway_nor_its_calls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("secret")

    async def scenario() -> None:
        async with rig(surveyed()) as at:
            monkeypatch.setattr(StatusDocument, "write", fail)
            monkeypatch.setattr(StatusHistory, "note", fail)
            status, _, body = await fetch(at, "/status.json")
            assert (status, "secret" in body) == (500, False)
            while "could not be noted" not in caplog.text:
                await fetch(at, "/healthz")
            answer = asyncio.ensure_future(at.stub.Complete(prompt("hi")))
            await (await at.next_call()).finish([65])
            assert (await answer).outputs[0].token_ids == [65]
            monkeypatch.undo()
            assert (await document(at))["state"] == "ready"

    run(scenario())


def test_the_page_holds_nothing_inline_and_names_nothing_outside() -> None:
    async def scenario() -> None:
        async with rig(surveyed()) as at:
            for path in PATHS:
                if path == "/status.json":
                    continue
                body = (await fetch(at, path))[2]
                outside = [word for word in body.split() if "://" in word and "www.w3.org" not in word]
                assert outside == [], path
                assert "innerHTML" not in body
            page = (await fetch(at, "/status"))[2]
            assert "style=" not in page
            assert "onclick" not in page
            assert page.count("<script") == page.count('<script type="module" src="/status.js">') == 1

    run(scenario())
