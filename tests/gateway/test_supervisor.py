"""The supervisor, run as a program of its own over small real processes, and sent real signals."""

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

# Its parts are Python programs given as arguments.
SUPERVISE = """
import asyncio, os, pathlib, sys
from prefixgate.gateway.supervisor import Part, Supervisor

def say(line):
    os.write(1, line.encode() + b"\\n")

async def watch():
    say("watching")
    if any(part.restarts for part in parts):
        await supervisor.until_ready(parts[-1].name)
        say(f"{parts[-1].name}: ready")

async def until(path):
    if path.name == "deaf":
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
    # It is ready when the file is there.
    while not path.exists():
        await asyncio.sleep(0.01)

async def until_taken(path):
    await until(path)
    path.unlink()

def part(i, program):
    # A program can say by which file it is known to be ready; it is started again then.
    path = next((pathlib.Path(line[8:]) for line in program.splitlines() if line.startswith("# ready ")), None)
    # And by which one to hang.
    hangs = next((pathlib.Path(line[8:]) for line in program.splitlines() if line.startswith("# hangs ")), None)
    return Part(f"part{i}", [sys.executable, "-c", program], 20.0 if "stubborn" not in program else 0.2,
                (lambda: until(path)) if path else None, (lambda: until_taken(hangs)) if hangs else None,
                restarts=path is not None)

parts = [part(i, program) for i, program in enumerate(sys.argv[1:])]
supervisor = Supervisor(parts, os.environ, say)
sys.exit(supervisor.run(watch))
"""

# Parts tell what happens to them on their standard output, which they have from the supervisor. All write by os.write:
# a print can be cut in two by another process's, and a signal handler cannot enter it twice.
WAITING = """
import os, signal, sys
def say(text):
    os.write(1, b"{name} " + text + b"\\n")
def stop(*_):
    say(b"stops")
    os._exit({code})
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, lambda *_: say(b"was interrupted"))
say(b"is %d" % os.getpid())
while True:
    signal.pause()
"""
STUBBORN = """
# stubborn
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"{name} ignores it\\n"))
os.write(1, b"{name} is %d\\n" % os.getpid())
while True:
    signal.pause()
"""


HURRIED = """
import os, signal
def say(text):
    os.write(1, b"{name} " + text + b"\\n")
asked = []
def stop(*_):
    asked.append(1)
    if len(asked) == 1:
        return say(b"drains")
    say(b"hurries")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
say(b"is %d" % os.getpid())
while True:
    signal.pause()
"""

DEAF = "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"


def waiting(name: str, code: int = 0) -> str:
    return WAITING.format(name=name, code=code)


class Supervised:
    """A running supervisor and the lines that it and its parts have printed."""

    def __init__(self, *programs: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, *programs], stdout=subprocess.PIPE, text=True, process_group=0
        )
        self.lines: list[str] = []

    @property
    def output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def read_until(self, *beginnings: str) -> list[str]:
        """Read on until a line with each beginning has come; returns those lines."""
        found: dict[str, str] = {}
        while len(found) < len(beginnings):
            line = self.output.readline()
            assert line, f"ended before {set(beginnings) - set(found)}: {self.lines}"
            self.lines.append(line.strip())
            found.update({beginning: line.strip() for beginning in beginnings if line.startswith(beginning)})
        return [found[beginning] for beginning in beginnings]

    def finish(self) -> int:
        self.lines += [line.strip() for line in self.output]
        return self.process.wait()


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def start(*programs: str) -> Supervised:
        started.append(Supervised(*programs))
        return started[-1]

    yield start
    for supervised in started:
        supervised.process.kill()
        supervised.process.wait()
        supervised.output.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_parts_in_their_order(supervise: Callable[..., Supervised], number: signal.Signals) -> None:
    supervised = supervise(waiting("first"), waiting("second"))
    supervised.read_until("first is", "second is", "watching")
    # To the whole group, as a terminal does: the parts must not hear of it but from their supervisor.
    os.killpg(supervised.process.pid, number)
    assert supervised.finish() == 0
    ends = [line for line in supervised.lines if line.endswith("stops")]
    assert ends == ["first stops", "second stops"]
    assert not any("interrupted" in line for line in supervised.lines)


def test_a_part_that_does_not_end_well_is_told(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(waiting("first", code=3), waiting("second"))
    supervised.read_until("first is", "second is")
    supervised.process.terminate()
    assert supervised.finish() == 1
    assert "part0 did not end well (exit code 3)" in supervised.lines
    assert "second stops" in supervised.lines


@pytest.mark.parametrize(
    ("program", "how"), [("import sys; sys.exit(0)", "exit code 0"), ("import os; os.abort()", "signal SIGABRT")]
)
def test_when_one_part_ends_the_other_is_stopped_and_the_exit_code_is_not_zero(
    supervise: Callable[..., Supervised], program: str, how: str
) -> None:
    # The one that ends waits for nothing, so the other may not even have set its handler: both ends are in order.
    supervised = supervise(waiting("first"), program)
    assert supervised.finish() == 1
    assert f"part1 ended by itself ({how}); stopping the rest" in supervised.lines
    assert not any("did not end well" in line for line in supervised.lines)


DYING = """
# ready {ready}
import os, pathlib
lives = pathlib.Path("{lives}")
lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
os.write(1, b"{name} lives\\n")
if "{ready}":
    pathlib.Path("{ready}").touch()
if len(lives.read_text()) <= {deaths}:
    import time
    while not pathlib.Path("{told}").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""


def test_a_part_that_dies_after_it_has_served_is_started_again_and_the_rest_live_on(
    supervise: Callable[..., Supervised], tmp_path: Path
) -> None:
    ready, told = tmp_path / "ready", tmp_path / "told"
    dying = DYING.format(name="second", ready=ready, lives=tmp_path / "lives", deaths=2, told=told) + waiting("second")
    supervised = supervise(waiting("first"), dying)
    supervised.read_until("first is", "second lives", "watching", "part1: ready")
    told.touch()
    for _ in range(2):
        (said,) = supervised.read_until("part1 ended by itself")
        assert re.fullmatch(r"part1 ended by itself \(signal SIGKILL\); starting it again in [0-9.]+ s", said)
    # Its last life, which lasts.
    supervised.read_until("second is", "part1: ready again after")
    supervised.process.terminate()
    assert supervised.finish() == 0
    assert [line for line in supervised.lines if line.endswith("stops")] == ["first stops", "second stops"]


def test_a_part_that_hangs_is_killed_and_started_again(supervise: Callable[..., Supervised], tmp_path: Path) -> None:
    ready, hangs = tmp_path / "ready", tmp_path / "hangs"
    program = f"# ready {ready}\n# hangs {hangs}\nimport pathlib\npathlib.Path('{ready}').touch()\n"
    supervised = supervise(waiting("first"), program + waiting("second"))
    supervised.read_until("first is", "second is", "part1: ready")
    hangs.touch()
    supervised.read_until("part1 hangs and is killed")
    (said,) = supervised.read_until("part1 ended by itself")
    assert "signal SIGKILL" in said
    supervised.read_until("second is", "part1: ready again after")
    supervised.process.terminate()
    assert supervised.finish() == 0
    assert "second stops" in supervised.lines


def test_a_part_that_never_served_is_not_started_again(supervise: Callable[..., Supervised], tmp_path: Path) -> None:
    program = f"# ready {tmp_path}/never\nraise SystemExit(3)"
    supervised = supervise(waiting("first"), program)
    assert supervised.finish() == 1
    assert "part1 ended by itself (exit code 3); stopping the rest" in supervised.lines


def test_told_to_stop_while_a_part_is_down_it_does_not_start_it_again(
    supervise: Callable[..., Supervised], tmp_path: Path
) -> None:
    ready, told = tmp_path / "ready", tmp_path / "told"
    dying = DYING.format(name="second", ready=ready, lives=tmp_path / "lives", deaths=1, told=told) + waiting("second")
    supervised = supervise(waiting("first"), dying)
    supervised.read_until("first is", "part1: ready")
    told.touch()
    supervised.read_until("part1 ended by itself")
    supervised.process.terminate()
    assert supervised.finish() == 0
    assert "first stops" in supervised.lines


def test_what_waits_for_a_part_and_takes_no_cancel_keeps_nobody(
    supervise: Callable[..., Supervised], tmp_path: Path
) -> None:
    supervised = supervise("# ready " + str(tmp_path / "deaf") + waiting("first"), waiting("second"))
    supervised.read_until("first is", "second is", "watching")
    supervised.process.terminate()
    assert supervised.finish() == 0
    assert "second stops" in supervised.lines


def test_a_part_that_ignores_the_signal_is_killed_in_the_end(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(STUBBORN.format(name="first"), waiting("second"))
    supervised.read_until("first is", "second is")
    supervised.process.terminate()
    assert supervised.finish() == 1
    assert "first ignores it" in supervised.lines
    assert "part0 did not end within 0.2 s and is killed" in supervised.lines
    assert "second stops" in supervised.lines


def test_a_second_signal_has_everything_end_at_once_and_in_order(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(HURRIED.format(name="first"), HURRIED.format(name="second"))
    supervised.read_until("first is", "second is")
    supervised.process.terminate()
    supervised.read_until("first drains")
    supervised.process.send_signal(signal.SIGINT)
    assert supervised.finish() == 128 + signal.SIGINT
    at = supervised.lines.index("SIGINT: ending everything at once")
    assert supervised.lines[at + 1 :] == ["first hurries", "second drains", "second hurries"]


def test_what_ignores_a_second_signal_is_killed(supervise: Callable[..., Supervised]) -> None:
    deaf = STUBBORN.replace("# stubborn", "").replace("import os, signal\n", DEAF, 1)
    supervised = supervise(deaf.format(name="first"))
    supervised.read_until("first is")
    supervised.process.terminate()
    supervised.read_until("first ignores it")
    supervised.process.terminate()
    assert supervised.finish() == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_no_part_outlives_a_killed_supervisor(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(waiting("first"), waiting("second"))
    lines = supervised.read_until("first is", "second is")
    parts = [os.pidfd_open(int(line.split()[-1])) for line in lines]
    supervised.process.kill()
    supervised.finish()
    assert {"first stops", "second stops"} <= set(supervised.lines)
    for part in parts:
        # Readable once the process has ended.
        assert select.select([part], [], [], 10.0)[0] == [part]
        os.close(part)
