import subprocess
import sys


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
