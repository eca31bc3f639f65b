"""`prefixgate generate` against a scripted gateway on a Unix socket."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from prefixgate.gateway.cli import main
from prefixgate.proto import gateway_pb2, generation_pb2
from prefixgate.proto.transport import SERVER_OPTIONS

USAGE = generation_pb2.Usage(
    prompt_tokens=50,
    cached_tokens=42,
    block_hit_tokens=32,
    partial_copy_tokens=10,
    copied_blocks=3,
    completion_tokens=7,
    queue_seconds=0.25,
    first_token_seconds=0.5,
)
END = gateway_pb2.GenerateResponse(
    completion=gateway_pb2.Completion(usage=USAGE, request_id="r1", model="m", incarnation="i")
)


def delta(
    text: str, *ids: int, index: int = 0, reason: generation_pb2.FinishReason = generation_pb2.FINISH_REASON_UNSPECIFIED
) -> gateway_pb2.OutputDelta:
    return gateway_pb2.OutputDelta(index=index, text=text, token_ids=ids, finish_reason=reason)


class ScriptedGateway:
    """Answers with a script of messages, then as told: the end of the stream, an error, or nothing for ever."""

    def __init__(self) -> None:
        self.script: list[gateway_pb2.GenerateResponse] = []
        self.error: tuple[grpc.StatusCode, str] | None = None
        self.hangs = False
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.credentials: list[str | bytes | None] = []
        self.ended = threading.Event()

    def generate(
        self, request: gateway_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[gateway_pb2.GenerateResponse]:
        self.requests.append(request)
        self.credentials.append(dict(context.invocation_metadata()).get("authorization"))
        context.add_callback(self.ended.set)
        yield from self.script
        if self.hangs:
            self.ended.wait()
        if self.error is not None:
            context.abort(*self.error)


@pytest.fixture
def socket(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/gateway.sock"


@pytest.fixture
def gateway(socket: str) -> Iterator[ScriptedGateway]:
    server = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
    servicer = ScriptedGateway()
    generate = grpc.unary_stream_rpc_method_handler(
        servicer.generate,
        request_deserializer=gateway_pb2.GenerateRequest.FromString,
        response_serializer=gateway_pb2.GenerateResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("prefixgate.v1.Gateway", {"Generate": generate})
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(socket)
    server.start()
    yield servicer
    servicer.ended.set()
    server.stop(None).wait()


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFIXGATE_API_KEY", raising=False)


def test_the_text_is_printed_and_the_cost_told_apart_from_it(
    gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.script = [
        gateway_pb2.GenerateResponse(deltas=[delta("Paris", 1)]),
        gateway_pb2.GenerateResponse(deltas=[delta(" is é.", 2, 3, reason=generation_pb2.FINISH_REASON_STOP)]),
        END,
    ]
    assert main(["generate", "Which city?", "--gateway", socket]) == 0
    output = capsys.readouterr()
    assert output.out == "Paris is é.\n"
    assert output.err.startswith(
        "[prompt 50 tokens, 42 cached (32 in shared blocks, 10 copied); copied blocks 3; completion 7 tokens (stop); "
        "first token after "
    )
    assert gateway.requests == [
        gateway_pb2.GenerateRequest(
            chat=gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="Which city?")]),
            sampling=generation_pb2.SamplingParams(),
        )
    ]
    assert gateway.credentials == [None]


def test_every_flag_reaches_the_request(gateway: ScriptedGateway, socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.script = [END]
    sampling = ["--max-tokens", "5", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.75", "--seed", "-9"]
    flags = [*sampling, "--n", "2", "--stop", "a", "--stop", "b"]
    assert main(["generate", "hi", "--gateway", socket, "--system", "be brief", "--api-key", "pg-1", *flags]) == 0
    monkeypatch.setenv("PREFIXGATE_API_KEY", "pg-2")
    assert main(["generate", "hi", "--gateway", socket, "--raw", "--temperature", "0", *flags[:2]]) == 0
    chat, raw = gateway.requests
    assert [(message.role, message.content) for message in chat.chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]
    assert chat.sampling == generation_pb2.SamplingParams(max_tokens=5, temperature=0.5, top_k=4, top_p=0.75, seed=-9)
    assert (chat.n, list(chat.stop)) == (2, ["a", "b"])
    # A zero that was given is a zero, and not "nothing said".
    assert raw == gateway_pb2.GenerateRequest(
        prompt="hi", sampling=generation_pb2.SamplingParams(max_tokens=5, temperature=0)
    )
    assert raw.sampling.HasField("temperature")
    assert gateway.credentials == ["Bearer pg-1", "Bearer pg-2"]


def test_the_prompt_can_come_from_standard_input(
    gateway: ScriptedGateway, socket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.script = [END]
    monkeypatch.setattr(sys, "stdin", io.StringIO("long\ntext"))
    assert main(["generate", "-", "--raw", "--gateway", socket]) == 0
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
    assert main(["generate", "hi", "--n", "3", "--gateway", socket]) == 0
    output = capsys.readouterr()
    assert output.out == "ab\n--- output 1\nmno\n--- output 2\nxy\n"
    assert "(length, stop, length)" in output.err


def test_json_holds_all_that_came(gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    last = delta("b", 2, 3, reason=generation_pb2.FINISH_REASON_STOP)
    last.matched_stop = "c"
    gateway.script = [gateway_pb2.GenerateResponse(deltas=[part]) for part in (delta("a", 1), last)] + [END]
    assert main(["generate", "hi", "--json", "--gateway", socket]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document.pop("client_first_token_seconds") >= 0
    assert document == {
        "request_id": "r1",
        "model": "m",
        "incarnation": "i",
        "outputs": [
            {"index": 0, "text": "ab", "token_ids": [1, 2, 3], "finish_reason": "stop", "matched_stop": "c"},
        ],
        "usage": {
            "prompt_tokens": 50,
            "cached_tokens": 42,
            "block_hit_tokens": 32,
            "partial_copy_tokens": 10,
            "claimed_tail_tokens": 0,
            "copied_blocks": 3,
            "completion_tokens": 7,
            "queue_seconds": 0.25,
            "first_token_seconds": 0.5,
        },
    }
    assert output.err == ""


def test_an_error_is_one_line_and_exit_code_1(
    gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.error = (grpc.StatusCode.INVALID_ARGUMENT, "n: 99 is\nnot allowed")
    assert main(["generate", "hi", "--gateway", socket]) == 1
    assert capsys.readouterr().err == "prefixgate generate: INVALID_ARGUMENT: n: 99 is not allowed\n"


def test_a_stream_that_ends_without_the_terminal_message_is_an_error(
    gateway: ScriptedGateway, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.script = [gateway_pb2.GenerateResponse(deltas=[delta("half", 1)])]
    assert main(["generate", "hi", "--gateway", socket]) == 1
    assert "without the terminal message" in capsys.readouterr().err


def test_nobody_there_is_one_line(socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--gateway", socket]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no gateway answers there" in error


@pytest.mark.parametrize("key", ["pg-é", "pg-a\nb"])
def test_a_key_that_cannot_be_sent_is_not_repeated(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--api-key", key]) == 1
    error = capsys.readouterr().err
    assert "API key" in error
    assert "pg-" not in error


def test_a_prompt_that_is_not_utf_8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a\udcff"]) == 1
    assert "not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", str(1 << 63)], f"--seed: '{1 << 63}' is not an integer of 64 bits"),
        (["--n", "two"], "--n: 'two' is not an integer of 64 bits"),
        (["--temperature", "warm"], "--temperature: invalid float value: 'warm'"),
        (["--gateway", "here"], "--gateway: 'here' is neither HOST:PORT nor unix:/PATH"),
        (["--raw", "--system", "x"], "--system: not allowed with argument --raw"),
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
    command = [sys.executable, "-m", "prefixgate.gateway", "generate", "hi", "--gateway", socket]
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
