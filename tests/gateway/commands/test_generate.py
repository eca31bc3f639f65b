"""`prefixgate generate` against a scripted gateway on a Unix socket."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from prefixgate.gateway.cli import main
from prefixgate.proto import gateway_pb2, generation_pb2
from tests.gateway.commands.scripted_gateway import END, ScriptedGateway, delta


def test_the_text_is_printed_and_the_cost_told_apart_from_it(
    gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.script = [
        gateway_pb2.GenerateResponse(deltas=[delta("Paris", 1)]),
        gateway_pb2.GenerateResponse(deltas=[delta(" is é.", 2, 3, reason=generation_pb2.FINISH_REASON_STOP)]),
        END,
    ]
    assert main(["generate", "Which city?", "--address", socket]) == 0
    output = capsys.readouterr()
    assert output.out == "Paris is é.\n"
    assert output.err.startswith(
        "[prompt 50 tokens, 42 cached (32 in shared blocks, 10 copied); copied blocks 3; completion 7 tokens (stop); "
        "first token after "
    )
    assert gateway.requests == [
        gateway_pb2.GenerateRequest(
            chat=gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="Which city?")])
        )
    ]
    assert gateway.credentials == [None]


def test_flags_reach_the_request(
    gateway: ScriptedGateway, socket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gateway.script = [END]
    key = tmp_path / "key"
    key.write_text("pg-1\n")
    flags = ["--max-tokens", "5", "--temperature", "0.5", "--seed", "-9", "--stop", "a", "--stop", "b", "--n", "2"]
    flags += ["--api-key-file", str(key)]
    monkeypatch.setenv("PREFIXGATE_API_KEY", "pg-2")
    assert main(["generate", "hi", "--address", socket, "--system", "be brief", *flags]) == 0
    assert main(["generate", "hi", "--address", socket, "--raw", "--temperature", "0"]) == 0
    chat, raw = gateway.requests
    assert [(message.role, message.content) for message in chat.chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]
    assert chat.sampling == generation_pb2.SamplingParams(max_tokens=5, temperature=0.5, seed=-9)
    assert (chat.n, list(chat.stop)) == (2, ["a", "b"])
    # A zero that was given is a zero, and not "nothing said".
    assert raw == gateway_pb2.GenerateRequest(prompt="hi", sampling=generation_pb2.SamplingParams(temperature=0))
    assert raw.sampling.HasField("temperature")
    assert gateway.credentials == ["Bearer pg-1", "Bearer pg-2"]


def test_the_prompt_can_come_from_standard_input(
    gateway: ScriptedGateway, socket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.script = [END]
    monkeypatch.setattr(sys, "stdin", io.StringIO("long\ntext"))
    assert main(["generate", "-", "--raw", "--address", socket]) == 0
    assert gateway.requests[0].prompt == "long\ntext"


def test_outputs_after_the_first_follow_it_whole(
    gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    length = generation_pb2.FINISH_REASON_LENGTH
    gateway.script = [
        gateway_pb2.GenerateResponse(deltas=[delta("a", 1), delta("x", 1, index=2), delta("m", 1, index=1)]),
        gateway_pb2.GenerateResponse(
            deltas=[delta("b", 2, reason=length), delta("y", 2, index=2, reason=length), delta("n", 2, index=1)]
        ),
        gateway_pb2.GenerateResponse(deltas=[delta("o", index=1, reason=generation_pb2.FINISH_REASON_STOP)]),
        END,
    ]
    assert main(["generate", "hi", "--n", "3", "--address", socket]) == 0
    output = capsys.readouterr()
    assert output.out == "ab\n--- output 1\nmno\n--- output 2\nxy\n"
    assert "(length, stop, length)" in output.err


def test_json_holds_all_that_came(gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    last = delta("b", 2, 3, reason=generation_pb2.FINISH_REASON_STOP)
    last.matched_stop = "c"
    gateway.script = [gateway_pb2.GenerateResponse(deltas=[part]) for part in (delta("a", 1), last)] + [END]
    assert main(["generate", "hi", "--json", "--address", socket]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document.pop("client_first_token_seconds") >= 0
    usage = document.pop("usage")
    assert document == {
        "request_id": "r1",
        "model": "m",
        "incarnation": "i",
        "outputs": [
            {"index": 0, "text": "ab", "token_ids": [1, 2, 3], "finish_reason": "stop", "matched_stop": "c"},
        ],
    }
    assert set(usage) == {field.name for field in generation_pb2.Usage.DESCRIPTOR.fields}
    assert (usage["prompt_tokens"], usage["claimed_tail_tokens"], usage["queue_seconds"]) == (50, 0, 0.25)
    assert output.err == ""


def test_an_error_is_one_line_and_exit_code_1(
    gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.error = (grpc.StatusCode.INVALID_ARGUMENT, "n: 99 is\nnot allowed")
    assert main(["generate", "hi", "--address", socket]) == 1
    assert capsys.readouterr().err == "prefixgate generate: INVALID_ARGUMENT: n: 99 is not allowed\n"


def test_a_stream_that_ends_without_the_terminal_message_is_an_error(
    gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.script = [gateway_pb2.GenerateResponse(deltas=[delta("half", 1)])]
    assert main(["generate", "hi", "--address", socket]) == 1
    assert "the answer broke off: the stream ended without its terminal message" in capsys.readouterr().err


def test_nobody_there_is_one_line(socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--address", socket]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"no gateway answers at {socket} (" in error
    assert "`prefixgate serve` starts one" in error


@pytest.mark.parametrize("key", ["pg-é", "pg-a\nb"])
def test_a_key_that_cannot_be_sent_is_not_repeated(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFIXGATE_API_KEY", key)
    assert main(["generate", "hi"]) == 1
    error = capsys.readouterr().err
    assert "API key" in error
    assert "pg-" not in error


def test_a_prompt_that_is_not_utf_8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a\udcff"]) == 1
    assert capsys.readouterr().err == (
        "prefixgate generate: content: is not text that UTF-8 can hold: surrogates not allowed at 1\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", str(1 << 63)], f"--seed: '{1 << 63}' is not an integer of 64 bits"),
        (["--n", "two"], "--n: 'two' is not an integer of 64 bits"),
        (["--temperature", "warm"], "--temperature: invalid float value: 'warm'"),
        (["--address", "here"], "--address: 'here' is neither HOST:PORT nor unix:/PATH"),
        (["--raw", "--system", "x"], "--system: not allowed with argument --raw"),
        (["--logprobs", "2"], "--logprobs: what it asks for is shown with --json only"),
        (["--stop-ids", "1,-2"], "--stop-ids: '-2' is not a token id"),
        (["--logit-bias", "3"], "--logit-bias: '3' is not ID=NUMBER"),
        (["--cache-mode", "off"], "--cache-mode: invalid choice: 'off'"),
        (["--timeout", "0"], "--timeout: '0' is not a number of seconds above 0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["generate", "hi", *arguments])
    assert refusal.value.code == 2
    assert words in capsys.readouterr().err


def run_command(socket: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "prefixgate.gateway", "generate", "hi", "--address", socket]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_cancels_the_call_and_leaves_no_traceback(gateway: ScriptedGateway, socket: str) -> None:
    gateway.script, gateway.hangs = [gateway_pb2.GenerateResponse(deltas=[delta("Par", 1)])], True
    with run_command(socket) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == "Par"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "\n")
    assert process.returncode == 130
    assert gateway.ended.wait(30)


def test_a_reader_that_goes_away_cancels_the_call_and_leaves_no_traceback(
    gateway: ScriptedGateway, socket: str
) -> None:
    gateway.script = [gateway_pb2.GenerateResponse(deltas=[delta("word " * 100, 1)])] * 1000
    gateway.hangs = True
    with run_command(socket) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert process.wait(timeout=30) == 141
        assert process.stderr.read() == ""
    assert gateway.ended.wait(30)
