"""`prefixgate explain`, `warm` and `pin`."""

import io
import json

import grpc
import pytest
from rich.console import Console

from prefixgate.gateway.cli import main
from prefixgate.gateway.client import Client
from prefixgate.gateway.commands.explain import why_missed
from prefixgate.gateway.commands.warm import follow
from prefixgate.proto import gateway_pb2, generation_pb2
from tests.gateway.commands.scripted_gateway import ScriptedGateway

FOUND = gateway_pb2.ExplainResponse(
    prompt_tokens=1234,
    cached_tokens=1100,
    block_hit_tokens=1088,
    partial_copy_tokens=12,
    miss_reason=gateway_pb2.MISS_REASON_DIVERGED,
    diverged_at=12,
    continuation_tokens=4,
    incarnation="life-1",
)
PIN = gateway_pb2.PinnedPrefix(
    pin_id="p1", salt="[red]s[/]\x1b[31m", pinned_tokens=1024, expires_in_seconds=3599.5, incarnation="life-1"
)
WARMED = [
    gateway_pb2.WarmResponse(progress=gateway_pb2.WarmProgress(prompt_tokens=90, cached_tokens=10, computed_tokens=40)),
    gateway_pb2.WarmResponse(progress=gateway_pb2.WarmProgress(prompt_tokens=90, cached_tokens=10, computed_tokens=80)),
    gateway_pb2.WarmResponse(
        completion=gateway_pb2.Completion(
            usage=generation_pb2.Usage(prompt_tokens=90, cached_tokens=10, block_hit_tokens=10), request_id="r1"
        )
    ),
]


def cells(text: str) -> list[list[str]]:
    """Read the rows of a table."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]


def test_explain_tells_each_source_and_the_reason(
    gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["Explain"] = FOUND
    assert main(["explain", "hi", "--system", "brief", "--salt", "s", "--address", socket]) == 0
    (request,) = gateway.requests
    assert [message.content for message in request.chat.messages] == ["brief", "hi"]
    assert request.salt == "s"
    output = capsys.readouterr().out
    assert [row[0] for row in cells(output)] == ["1,088", "12", "0", "134", "1,234"]
    assert "89% of it cached" in output
    assert output.endswith(
        "First miss: token 1,100; what is cached goes on differently from token 12 of its block on, for 4 tokens\n"
    )
    assert "\x1b" not in output


def test_explain_as_json(gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers["Explain"] = FOUND
    assert main(["explain", "hi", "--raw", "--json", "--address", socket]) == 0
    assert gateway.requests[0].prompt == "hi"
    document = json.loads(capsys.readouterr().out)
    assert (document["cached_tokens"], document["miss_reason"]) == (1100, "MISS_REASON_DIVERGED")


@pytest.mark.parametrize(("what", "salt"), [(["--all"], None), (["--salt", "s"], "s"), (["--salt", ""], "")])
def test_flush_forgets_what_it_is_told_to(
    gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str], what: list[str], salt: str | None
) -> None:
    gateway.answers["Flush"] = gateway_pb2.FlushResponse(freed_blocks=1234, ended_pins=1)
    assert main(["flush", *what, "--address", socket]) == 0
    (request,) = gateway.requests
    assert (request.salt if request.HasField("salt") else None) == salt
    assert capsys.readouterr().out == "1,234 blocks freed, 1 pins ended\n"


@pytest.mark.parametrize("what", [[], ["--all", "--salt", "s"]])
def test_flush_is_told_what_or_does_nothing(gateway: ScriptedGateway, socket: str, what: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["flush", *what, "--address", socket])
    assert gateway.requests == []


@pytest.mark.parametrize("reason", gateway_pb2.MissReason.values())
def test_every_reason_has_words(reason: gateway_pb2.MissReason) -> None:
    words = why_missed(gateway_pb2.ExplainResponse(cached_tokens=7, miss_reason=reason))
    assert ("did not tell" in words) == (reason == gateway_pb2.MISS_REASON_UNSPECIFIED)


def test_warm_tells_what_it_did(gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.script = WARMED
    assert main(["warm", "hi", "--priority", "3", "--retention", "80", "--address", socket]) == 0
    (request,) = gateway.requests
    assert (request.priority, request.cache.retention) == (3, 80)
    output = capsys.readouterr()
    assert output.out.startswith("prompt 90 tokens, 10 cached (10 in shared blocks); computed 80 in ")
    assert output.err == ""
    assert main(["warm", "hi", "--json", "--address", socket]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"] == 90


def test_warm_shows_a_bar_at_a_terminal(gateway: ScriptedGateway, socket: str) -> None:
    gateway.script = WARMED
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with Client(socket) as client, client.warm("hi") as stream:
        assert follow(stream, console).request_id == "r1"
    assert isinstance(console.file, io.StringIO)
    assert "90 of 90 tokens" in console.file.getvalue()


def test_pins_are_added_listed_and_removed(
    gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["Pin"] = gateway_pb2.PinResponse(pin=PIN, prompt_tokens=1030)
    gateway.answers["ListPins"] = gateway_pb2.ListPinsResponse(pins=[PIN])
    gateway.answers["Unpin"] = gateway_pb2.UnpinResponse()
    assert main(["pin", "add", "hi", "--raw", "--ttl", "3600", "--salt", "s", "--address", socket]) == 0
    assert capsys.readouterr().out == "p1: 1,024 of 1,030 tokens pinned for 3,600 s\n"
    assert gateway.requests[0] == gateway_pb2.PinRequest(prompt="hi", salt="s", ttl_seconds=3600)
    assert main(["pin", "list", "--address", socket]) == 0
    output = capsys.readouterr().out
    # Neither markup nor control characters of a salt have an effect.
    assert cells(output) == [["p1", "1,024", "3,600 s", "[red]s[/]\ufffd[31m", "life-1"]]
    assert "\x1b" not in output
    assert main(["pin", "remove", "p1", "--address", socket]) == 0
    assert capsys.readouterr().out == "p1: removed\n"
    assert gateway.requests[-1] == gateway_pb2.UnpinRequest(pin_id="p1")
    assert main(["pin", "list", "--json", "--address", socket]) == 0
    assert [pin["pin_id"] for pin in json.loads(capsys.readouterr().out)] == ["p1"]
    gateway.answers["ListPins"] = gateway_pb2.ListPinsResponse()
    assert main(["pin", "list", "--address", socket]) == 0
    assert capsys.readouterr().out == "no pins\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pin"], "ACTION"),
        (["pin", "add", "hi"], "--ttl"),
        (["pin", "remove"], "PIN"),
        (["pin", "list", "--ttl", "3"], "prefixgate pin list: error: --ttl: there is no such argument"),
        (["warm", "hi", "--cache-mode", "bypass"], "--cache-mode: there is no such argument"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    assert refusal.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["explain", "hi"], ["warm", "hi"], ["pin", "add", "hi", "--ttl", "3"], ["stats"]]
)
def test_a_refusal_is_one_line_and_exit_code_1(
    arguments: list[str], gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.error = (grpc.StatusCode.UNAUTHENTICATED, "the key is not\nknown")
    assert main([*arguments, "--address", socket]) == 1
    assert capsys.readouterr().err == (
        f"prefixgate {arguments[0]}: UNAUTHENTICATED: the key is not known; the key comes from the variable "
        "PREFIXGATE_API_KEY or --api-key-file\n"
    )
