"""The line that is logged of each call."""

import json
import logging
import re
from collections.abc import Mapping
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from prefixgate.gateway.call_log import log_call
from prefixgate.gateway.call_spans import CallSpans
from prefixgate.gateway.call_trace import UNTRACED, Traces
from prefixgate.gateway.live_calls import Call
from prefixgate.proto import gateway_pb2, generation_pb2
from prefixgate.proto.log_lines import JsonLines
from tests.gateway.rig import Rig, chat, collect, prompt, rig, run, tenants
from tests.project.tree import ROOT
from tests.tracing import Recorded, trace_id

SECRET = "what nobody may read"


def lines(caplog: pytest.LogCaptureFixture) -> list[Mapping[str, Any]]:
    """The lines of calls, as JSON writes them."""
    records = [record for record in caplog.records if record.name.endswith(".call_log")]
    return [json.loads(JsonLines().format(record)) for record in records]


def logged(
    caplog: pytest.LogCaptureFixture, scenario: Any, *, traces: Traces = UNTRACED, **settings: Any
) -> list[Mapping[str, Any]]:
    async def test() -> None:
        async with rig(traces=traces, **settings) as it:
            await scenario(it)

    with caplog.at_level(logging.INFO):
        run(test())
    return lines(caplog)


def test_a_call_that_went_well_has_one_line_with_what_it_cost(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(it: Rig) -> None:
        stream = it.stub.Generate(prompt("hello", request_id="mine"))
        call = await it.next_call()
        await call.finish(
            [65, 66],
            cached_tokens=4,
            block_hit_tokens=2,
            partial_copy_tokens=1,
            claimed_tail_tokens=1,
            queue_seconds=0.25,
        )
        await collect(stream)

    (line,) = map(dict, logged(caplog, scenario))
    assert line.pop("seconds") >= line.pop("first_token_seconds") > 0
    assert line.pop("worker").startswith("unix:")
    assert line.pop("time")
    assert line == {
        "level": "info",
        "logger": "prefixgate.gateway.call_log",
        "message": "Generate OK",
        "tenant": "local",
        "request_id": "mine",
        "prompt_tokens": 5,
        "computed_tokens": 1,
        "block_hit_tokens": 2,
        "partial_copy_tokens": 1,
        "claimed_tail_tokens": 1,
        "completion_tokens": 2,
        "attempts": 1,
        "finish": ["length"],
        "queue_seconds": 0.25,
    }


def test_the_page_about_logs_has_every_field_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded()

    async def scenario(it: Rig) -> None:
        stream = it.stub.Generate(prompt("hello"))
        await (await it.next_call()).finish([65])
        await collect(stream)

    (line,) = logged(caplog, scenario, traces=CallSpans(recorded.tracing, trust_clients=False))
    _, _, section = (ROOT / "docs" / "tracing.md").read_text().partition("## Logs")
    rows = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert told == [name for name in line if name not in ("time", "level", "logger", "message")]


def test_each_call_has_one_line_however_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(it: Rig) -> None:
        for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED):
            stream = it.stub.Generate(prompt("hello"))
            await (await it.next_call()).end(code, "no")
            with pytest.raises(grpc.aio.AioRpcError):
                await collect(stream)
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(it.stub.Generate(prompt("")))
        await it.stub.Tokenize(gateway_pb2.TokenizeRequest(prompt="abc"))
        stream = it.stub.Generate(prompt("hello"))
        call = await it.next_call()
        await call.send((0, [65, 66]))
        await stream.read()
        stream.cancel()
        await call.cancels.get()

    found = logged(caplog, scenario)
    assert [line["message"] for line in found] == [
        "Generate INTERNAL",
        "Generate RESOURCE_EXHAUSTED",
        "Generate INVALID_ARGUMENT",
        "Tokenize OK",
        "Generate CANCELLED",
    ]
    # What its client has of a call that it gave up is known, though its worker has not said so.
    assert [line.get("completion_tokens") for line in found] == [0, 0, None, None, 2]
    assert [line.get("prompt_tokens") for line in found] == [5, 5, 0, 3, 5]


def test_nothing_that_was_said_and_no_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    key = "a key of acme's that nobody may read"
    request = chat(("system", SECRET), ("user", SECRET), stop=[SECRET], cache=generation_pb2.CacheControl(salt=SECRET))

    async def scenario(it: Rig) -> None:
        stream = it.stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),))
        await (await it.next_call()).finish([65])
        await collect(stream)

    (line,) = logged(caplog, scenario, tenant_settings=tenants(acme=key))
    assert line["tenant"] == "acme"
    written = json.dumps([*map(dict, [line]), caplog.text])
    assert SECRET not in written
    assert key not in written


def test_a_line_that_cannot_be_written_is_no_end_of_a_call(caplog: pytest.LogCaptureFixture) -> None:
    call = Call("Generate", "acme", "mine", task=None)
    call.record.usage = cast(generation_pb2.Usage, "no account")
    with caplog.at_level(logging.INFO):
        log_call(call, grpc.StatusCode.OK)
    assert "could not be logged" in caplog.text


def test_a_request_id_that_would_end_the_line_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(it: Rig) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(it.stub.Generate(prompt("hello", request_id="x\nGenerate OK")))

    (line,) = logged(caplog, scenario)
    assert len(line["request_id"]) == 32


def test_the_line_of_a_call_that_is_traced_names_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded()

    async def scenario(it: Rig) -> None:
        await it.stub.Stats(gateway_pb2.StatsRequest())

    (line,) = logged(caplog, scenario, traces=CallSpans(recorded.tracing, trust_clients=False))
    (span,) = recorded.all()
    assert line["trace_id"] == trace_id(span)
