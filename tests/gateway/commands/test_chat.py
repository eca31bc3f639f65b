"""`prefixgate chat`: by lines from a pipe, and at a terminal."""

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from prefixgate.gateway.cli import main
from prefixgate.proto import gateway_pb2
from tests.gateway.commands.scripted_gateway import ScriptedGateway, delta, saying

HANG_SECONDS = 60


def turns(request: gateway_pb2.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


def test_each_question_goes_with_all_that_was_said_before(
    gateway: ScriptedGateway, socket: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.scripts = [saying("Pa", "ris"), saying("Rome")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Of France?\n\nOf Italy?"))
    assert main(["chat", "--address", socket, "--system", "brief", "--max-tokens", "5"]) == 0
    first, second = gateway.requests
    assert turns(first) == [("system", "brief"), ("user", "Of France?")]
    assert turns(second) == [*turns(first), ("assistant", "Paris"), ("user", "Of Italy?")]
    assert second.sampling.max_tokens == 5
    output = capsys.readouterr()
    assert output.out == "Paris\nRome\n"
    lines = output.err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(
        "[prompt 50 tokens, 42 cached (32 in shared blocks, 10 copied); answer 7 tokens; first token after "
    )


def test_a_failure_ends_a_script(
    gateway: ScriptedGateway, socket: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.error = (grpc.StatusCode.INVALID_ARGUMENT, "chat: comes to too many tokens")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert main(["chat", "--address", socket]) == 1
    assert capsys.readouterr().err == "prefixgate chat: INVALID_ARGUMENT: chat: comes to too many tokens\n"
    assert len(gateway.requests) == 1


class Terminal:
    """The command at a terminal, with the end of it that a person would hold."""

    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process = process
        self._end = end
        self.shown = b""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, text: str) -> None:
        """Read what is shown until a text has come since the last call."""
        while text.encode() not in self.shown:
            self.shown += os.read(self._end, 4096)
        self.shown = self.shown.partition(text.encode())[2]


@contextmanager
def at_a_terminal(*arguments: str) -> Iterator[Terminal]:
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "prefixgate.gateway", *arguments]
    environment = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment)
    os.close(inner)
    try:
        yield Terminal(process, outer)
    finally:
        process.kill()
        process.wait()
        os.close(outer)


def test_ctrl_c_breaks_off_the_answer_and_not_the_chat(gateway: ScriptedGateway, socket: str) -> None:
    gateway.script = [gateway_pb2.GenerateResponse(deltas=[delta("Once upon", 1)])]
    gateway.hangs = True
    with at_a_terminal("chat", "--address", socket) as terminal:
        terminal.until("> ")
        terminal.type("A tale\n")
        terminal.until("Once upon")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("[broken off]")
        assert gateway.ended.wait(HANG_SECONDS)
        gateway.hangs = False
        gateway.script = saying("the end")
        terminal.until("> ")
        terminal.type("Go on\n")
        terminal.until("the end")
        terminal.until("42 cached")
        # An error ends the turn only, and its question is forgotten.
        gateway.error = (grpc.StatusCode.INVALID_ARGUMENT, "too long")
        gateway.script = []
        terminal.type("More\n")
        terminal.until("INVALID_ARGUMENT: too long; the question is forgotten")
        gateway.error, gateway.script = None, saying("fine")
        terminal.type("Still there?\n")
        terminal.until("fine")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(HANG_SECONDS) == 0
    assert turns(gateway.requests[-1]) == [
        ("user", "A tale"),
        ("assistant", "Once upon"),
        ("user", "Go on"),
        ("assistant", "the end"),
        ("user", "Still there?"),
    ]
