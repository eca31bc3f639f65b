import subprocess
import sys

import pytest

from prefixgate.gateway.console import harmless, remark, write_text


def test_what_runs_goes_on_when_nobody_reads_its_lines() -> None:
    program = """
import sys
from prefixgate.gateway.console import say
say("first")
sys.stdin.read()
for number in range(1000):
    say("more " * 100)
sys.stderr.write("done")
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        # A line is there at once, and not when the program ends.
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == "done"
        assert process.wait(30) == 0


@pytest.mark.parametrize("text", ["plain\n\ttext é 漢 👋", ""])
def test_text_goes_out_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_text(text)
    assert capsys.readouterr().out == text
    assert harmless(text) == text


@pytest.mark.parametrize("character", ["\x1b", "\r", "\x07", "\x08", "\x00", "\x7f", "\x9b"])
def test_what_could_move_a_cursor_is_replaced(
    character: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(f"a{character}b")
    # Programs that read a pipe get all of it.
    assert capsys.readouterr().out == f"a{character}b"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_text(f"a{character}b")
    assert capsys.readouterr().out == "a\ufffdb"


def test_a_remark_is_one_line_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    remark("[bold]" + "long " * 100 + "\x1b[31m")
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "[bold]" + "long " * 100 + "\ufffd[31m\n"
